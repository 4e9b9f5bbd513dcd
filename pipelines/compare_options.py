"""Options of `stillroom compare`, and the capture settings that it compares."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from cache.format import Encoding, Logprobs, Tail
from pipelines.errors import CaptureError
from pipelines.options import PrecomputeOptions

SETTINGS = (
    *(f"exact:{k}" for k in (8, 12, 16, 24, 32, 48, 64, 96, 128)),
    *(f"sampled:{k}/1" for k in (8, 12, 16, 24, 32, 48, 64, 96, 128)),
    "sampled:32/8",  # what a capture keeps if nothing is said
)
_TEMPERATURES = (1.0, 2.0, 4.0)
ROUNDINGS = ("float32", "float16", "rounded:6", "rounded:4")


@dataclass(frozen=True)
class Setting:
    """One way to capture.

    Attributes:
      tail: "none" (k exact entries) or "sampled".
      k: entries per position.
      exact: least number of exact entries; k if the tail is not sampled.
      logprobs, mantissa_bits: the rounding, as in `cache.format.Encoding`.
    """

    tail: Tail
    k: int
    exact: int
    logprobs: Logprobs = "rounded"
    mantissa_bits: int = 6

    @property
    def name(self) -> str:
        """As a person would say it: "sampled 32, exact 8, 6 bits"."""
        entries = f"exact {self.k}"
        if self.tail == "sampled":
            entries = f"sampled {self.k}, exact {self.exact}"
        return f"{entries}, {self.rounding}"

    @property
    def rounding(self) -> str:
        return f"{self.mantissa_bits} bits" if self.logprobs == "rounded" else self.logprobs

    @property
    def relative_error(self) -> float:
        """Largest relative rounding error of a stored log-prob."""
        return self.encoding(2, self.k, (1.0,), 1).relative_error

    @property
    def words(self) -> str:
        """The options of `stillroom precompute` that capture like this."""
        exact = f" --exact {self.exact}" if self.tail == "sampled" else ""
        bits = f" --mantissa-bits {self.mantissa_bits}" if self.logprobs == "rounded" else ""
        return f"--k {self.k}{exact} --tail {self.tail} --logprobs {self.logprobs}{bits}"

    def encoding(
        self, length: int, vocabulary: int, temperatures: tuple[float, ...], rows: int
    ) -> Encoding:
        """The encoding of a cache with this setting and `rows` rows in a shard."""
        return Encoding(
            length=length,
            vocabulary=vocabulary,
            k=self.k,
            tail=self.tail,
            temperatures=temperatures if self.tail == "none" else (1.0,),
            logprobs=self.logprobs,
            mantissa_bits=self.mantissa_bits,
            rows_per_shard=rows,
        )


def parse_settings(entries: tuple[str, ...], roundings: tuple[str, ...]) -> tuple[Setting, ...]:
    """Every entry with every rounding.

    Args:
      entries: "exact:K", or "sampled:K/E" with E the least number of exact entries.
      roundings: "float32", "float16", or "rounded:M" with M mantissa bits.

    Raises:
      CaptureError: something else, or nothing.
    """
    if not entries or not roundings:
        raise CaptureError("--settings and --roundings need at least one each.")
    kept = [_parse_rounding(text) for text in dict.fromkeys(roundings)]
    return tuple(
        Setting(*entry, *rounding)
        for entry in (_parse_entry(text) for text in dict.fromkeys(entries))
        for rounding in kept
    )


def _parse_entry(text: str) -> tuple[Tail, int, int]:
    exact = re.fullmatch(r"exact:([0-9]{1,6})", text)
    if exact and int(exact[1]) >= 1:
        return "none", int(exact[1]), int(exact[1])
    sampled = re.fullmatch(r"sampled:([0-9]{1,6})/([0-9]{1,6})", text)
    if sampled and 1 <= int(sampled[2]) < int(sampled[1]):
        return "sampled", int(sampled[1]), int(sampled[2])
    raise CaptureError(
        f"--settings has {text!r}; expected exact:K, such as exact:64, or sampled:K/E with fewer "
        "exact entries E than entries K, such as sampled:32/8."
    )


def _parse_rounding(text: str) -> tuple[Logprobs, int]:
    if text == "float32":
        return "float32", 6
    if text == "float16":
        return "float16", 6
    bits = re.fullmatch(r"rounded:([0-9]{1,2})", text)
    if bits and 1 <= int(bits[1]) <= 10:
        return "rounded", int(bits[1])
    raise CaptureError(
        f"--roundings has {text!r}; expected float32, float16, or rounded:M with 1 to 10 mantissa "
        "bits, such as rounded:6."
    )


# What is asked of a cache as of a teacher.
_WITH_A_CACHE = (
    *("cache", "settings", "roundings", "batch", "renormalise", "all", "plot", "json"),
    *("rows", "seed"),
)


@dataclass(frozen=True)
class CompareOptions:
    """Compares capture settings on a sample: bytes per token, and what they lose.

    With --teacher and --dataset, on fresh rows; nothing is captured. From a CACHE of exact
    entries, without the teacher: only exact settings of no more entries, and only what the
    entries beyond the cache's own do not decide (see the notes that it prints).

    Example: stillroom compare --teacher models/teacher --dataset corpus.jsonl --budget 80
    """

    cache: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="CACHE")] = None
    """A finished cache of exact entries. Unset: a teacher and a dataset are measured."""
    teacher: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH|MODULE:FUNCTION")] = None
    """As in precompute. Unset: a CACHE is measured."""
    dataset: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH")] = None
    """As in precompute. Unset: a CACHE is measured."""
    student: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH|MODULE:FUNCTION")] = None
    """A model with the teacher's tokenizer, at whose predictions gradients are measured. Unset:
    a student that knows how frequent tokens are and nothing else."""

    # What is compared.
    settings: tuple[str, ...] | None = None
    """exact:K, or sampled:K/E with E the least number of exact entries. Unset: many."""
    roundings: tuple[str, ...] = ROUNDINGS
    """float32, float16, or rounded:M with M mantissa bits."""
    batch: int = 4096
    """Labels that a training step takes the mean gradient of."""
    budget: float | None = None
    """Recommend a setting for at most so many bytes per token. Unset: recommend none."""
    renormalise: bool = False
    """Also show exact entries renormalised, without the rest as one more class."""
    all: bool = False
    """Show every setting, also those that cheaper ones beat in every error. --json always does."""
    plot: Path | None = None
    """Draw error against bytes into this file, such as errors.png; needs matplotlib. Unset:
    draw nothing."""
    json: bool = False
    """Print JSON."""

    # The sample.
    rows: int = 16
    """Rows measured."""
    seed: int = 0
    """Chooses documents (or rows of the cache), and draws sampled tails."""
    temperatures: tuple[float, ...] | None = None
    """Where the mass of the exact entries is measured; a cache has its own. Unset: 1, 2 and 4."""
    name: str | None = None
    """Configuration of a hub dataset, or of a folder whose README.md names it. Unset: its
    default one."""
    split: str = "train"
    """Split of the dataset; of a folder, as `datasets` tells it by the names of files."""
    revision: str | None = None
    """Revision of a hub dataset. Unset: its newest."""
    column: str = "text"
    """Column that holds the text."""
    text_unit: Literal["file", "line"] | None = None
    """What is one document in a .txt file. Unset: file."""
    teacher_revision: str | None = None
    """Revision of a hub teacher. Unset: its newest."""
    tokenizer: str | None = None
    """Where the tokenizer is. Unset: with the teacher."""
    vocabulary: int | None = None
    """Keep only ids below this. Unset: the tokenizer's size."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Of the weights and activations of teacher and student. Unset: float32."""
    layout: Literal["pack", "pad"] | None = None
    """As in precompute. Unset: pack."""
    length: int | None = None
    """Tokens in a row. Unset: 512."""
    bos: Literal["auto", "on", "off"] | None = None
    """Begin-of-sequence token before each document; auto: as the tokenizer's own files say, refused
    where releases of transformers read them differently. Unset: auto."""

    def __post_init__(self) -> None:
        def demand(holds: bool, name: str, expected: str) -> None:
            if not holds:
                option = name.replace("_", "-")
                value = getattr(self, name)
                found = " ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
                raise CaptureError(f"--{option} should be {expected}, found {found}.")

        if self.cache is None and not (self.teacher and self.dataset):
            raise CaptureError(
                "compare needs --teacher and --dataset, or a CACHE of exact entries."
            )
        if self.cache is not None:
            for option in fields(self):
                given = getattr(self, option.name) != option.default
                if given and option.name not in (*_WITH_A_CACHE, "budget"):
                    raise CaptureError(
                        f"--{option.name.replace('_', '-')} and a CACHE exclude each other: a "
                        "cache is compared as it is, without any model. Leave one of them out."
                    )
            if self.budget is not None:
                raise CaptureError(
                    "--budget needs --teacher and --dataset: a cache does not hold what lies "
                    "beyond its entries, so errors measured from it are too small to choose by."
                )
        demand(self.rows >= 1, "rows", "at least 1")
        demand(self.batch >= 1, "batch", "at least 1")
        demand(0 <= self.seed < 2**32, "seed", "between 0 and 2^32 - 1")
        budget = self.budget
        demand(budget is None or (math.isfinite(budget) and budget > 0), "budget", "above 0")
        if self.temperatures is not None:
            good = all(math.isfinite(value) and value > 0 for value in self.temperatures)
            demand(good and len(self.temperatures) > 0, "temperatures", "above 0")
        exact = [setting for setting in self.wanted() if setting.tail == "none"]
        if self.renormalise and not exact:
            raise CaptureError(
                "--renormalise is of exact entries, and --settings asks for none. Leave it out, or "
                "ask for exact:K too."
            )
        if self.plot is not None and not self.plot.absolute().parent.is_dir():
            raise CaptureError(f"--plot {self.plot}: there is no folder {self.plot.parent}.")

    @property
    def measured_temperatures(self) -> tuple[float, ...]:
        """1 and the temperatures asked for, ascending."""
        return tuple(sorted({1.0, *map(float, self.temperatures or _TEMPERATURES)}))

    def wanted(self) -> tuple[Setting, ...]:
        """The settings asked for, or all that are compared by default."""
        return parse_settings(SETTINGS if self.settings is None else self.settings, self.roundings)

    def capture(self, out: str) -> PrecomputeOptions:
        """The options of a capture of the same rows, but for its targets.

        Raises:
          CaptureError: an option that no capture takes.
        """
        assert self.teacher is not None
        assert self.dataset is not None
        same = ("precision", "layout", "length", "bos")
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        return PrecomputeOptions(
            dataset=self.dataset,
            teacher=self.teacher,
            out=out,
            name=self.name,
            split=self.split,
            revision=self.revision,
            column=self.column,
            text_unit=self.text_unit,
            teacher_revision=self.teacher_revision,
            tokenizer=self.tokenizer,
            vocabulary=self.vocabulary,
            k=1,
            tail="none",
            **given,
        )
