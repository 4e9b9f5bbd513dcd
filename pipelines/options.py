"""Every option of a capture: the one definition behind the command line, files and Python."""

from __future__ import annotations

import math
import os
import shlex
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import tyro

from pipelines.errors import CaptureError

# Options that may be local paths.
_PATHS = ("dataset", "teacher", "tokenizer", "out")
# What runs a capture if no runner is named: Beam's own, in processes of ours.
LOCAL = "local"
# With a sampled tail the weights hold at one temperature only. With exact entries these
# are what the sources train at; each costs two bytes a position.
_TEMPERATURES = {"sampled": (1.0,), "none": (1.0, 2.0, 4.0)}
# Sampling keeps as many tokens exact as are likely enough; these are kept in any case.
_MOST_EXACT = 8
# 0.3 % total variation on average.
_MANTISSA_BITS = 6


@dataclass(frozen=True)
class PrecomputeOptions:
    """Runs a teacher over a corpus and writes what students need into a cache.

    Run the same command again after any interruption: it goes on where it stopped, and a
    finished cache is left as it is. A command that asks for anything else than what the
    cache holds is refused.

    Example: stillroom precompute --dataset corpus.jsonl --teacher models/teacher --out cache

    --config FILE.toml reads options from a file; those on the command line win. The options
    of every run are written to CACHE/runs/RUN/config.toml.
    """

    dataset: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")]
    """Hub name, folder of `save_to_disk`, or files: .jsonl, .parquet, .txt, a folder or glob."""
    teacher: Annotated[str, tyro.conf.arg(metavar="NAME|PATH|MODULE:FUNCTION")]
    """Hub name or folder with config.json and *.safetensors, a .gguf file, or a function that
    returns an NNX module."""
    out: Annotated[str, tyro.conf.arg(metavar="CACHE")]
    """Where the cache goes: a local path, gs://… or s3://…."""

    # The corpus.
    name: str | None = None
    """Configuration of a hub dataset, or of a folder whose README.md names it. Unset: its
    default one."""
    split: str = "train"
    """Split of the dataset; of a folder, as `datasets` tells it by the names of files."""
    revision: str | None = None
    """Revision of a hub dataset; resolved to a commit. Unset: its newest."""
    column: str = "text"
    """Column that holds the text."""
    text_unit: Literal["file", "line"] | None = None
    """What is one document in a .txt file. Unset: file."""
    limit: int | None = None
    """Take only the first so many documents. Unset: all."""

    # The teacher.
    teacher_revision: str | None = None
    """Revision of a hub teacher; resolved to a commit. Unset: its newest."""
    tokenizer: str | None = None
    """Where the tokenizer is. Unset: with the teacher."""
    vocabulary: int | None = None
    """Keep only ids below this; the others get no probability. Unset: the tokenizer's size."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the teacher's weights and activations; log-probs are always computed in float32."""

    # Rows.
    layout: Literal["pack", "pad"] = "pack"
    """pack: several documents in a row, each attending to itself only. pad: one per row."""
    length: int = 512
    """Tokens in a row."""
    overlap: int = 1
    """Tokens that a document longer than a row repeats in its next row; 1 loses no label."""
    bos: Literal["auto", "on", "off"] = "auto"
    """Begin-of-sequence token before each document; auto: as the tokenizer's own files say, refused
    where releases of transformers read them differently."""
    eos: Literal["auto", "on", "off"] = "off"
    """End-of-sequence token after each document; auto: as for bos."""

    # Targets.
    k: int = 32
    """Entries per position. 32, 8 of them exact, takes about 80 bytes per token."""
    exact: int | None = None
    """With a sampled tail: at least so many entries are the exact most likely tokens. Fewer than
    --k: one at least stands for all other tokens. Unset: half of --k, at most 8."""
    tail: Literal["sampled", "none"] = "sampled"
    """sampled: the rest of the k entries are an unbiased sample. none: all are exact (top-k)."""
    temperatures: tuple[float, ...] | None = None
    """Temperatures at which students can train. Unset: 1 with a sampled tail, else 1, 2 and 4."""
    seed: int | None = None
    """Of the sampled tail. Unset: 0."""
    logprobs: Literal["rounded", "float16", "float32"] = "rounded"
    """How log-probs are stored; rounded: float16 with fewer mantissa bits. The tail's mass and the
    entropy are float32 with float32, else float16."""
    mantissa_bits: int | None = None
    """Kept by `rounded`. Unset: 6, which is 0.3 % total variation on average."""

    # Work.
    micro_batch: int = 4
    """Rows scored at once on each device. Part of the cache's identity: it decides last bits."""
    chunk: int = 64
    """Positions whose logits exist at once, per row."""
    rows_per_shard: int = 256
    """The unit of work, of retry and of checking: one file per array."""
    documents_per_part: int = 512
    """Documents that are tokenised and packed together."""
    workers: int = 1
    """Processes of the local runner on this machine. Each loads the teacher."""
    runner: str = LOCAL
    """local, or a Beam runner: DaskRunner, DataflowRunner, another name that Beam knows, or the
    full name of its class, such as package.module.Runner."""
    beam_options: str = ""
    """Beam's own options for another runner, in one string: "--project=p --region=r"."""
    shard_teacher: bool = False
    """Spread one copy of the teacher over this machine's devices, instead of one copy each."""
    keep_parts: bool = False
    """Keep the tokenised rows after the capture."""

    def __post_init__(self) -> None:
        def demand(holds: bool, name: str, expected: str) -> None:
            if not holds:
                option = name.replace("_", "-")
                raise CaptureError(
                    f"--{option} should be {expected}, found {getattr(self, name)!r}."
                )

        for option in ("dataset", "teacher", "out"):
            demand(bool(getattr(self, option).strip()), option, "given")
        for option in ("k", "micro_batch", "chunk", "rows_per_shard"):
            demand(getattr(self, option) >= 1, option, "at least 1")
        for option in ("documents_per_part", "workers", "overlap"):
            demand(getattr(self, option) >= 1, option, "at least 1")
        for option in ("limit", "vocabulary", "exact"):
            value = getattr(self, option)
            demand(value is None or value >= 1, option, "at least 1")
        demand(self.length >= 2, "length", "at least 2")
        demand(self.overlap < self.length, "overlap", f"less than --length {self.length}")
        demand(0 <= self.captured_seed < 2**32, "seed", "between 0 and 2^32 - 1")
        demand(1 <= self.captured_mantissa_bits <= 10, "mantissa_bits", "between 1 and 10")
        self._check_effects()
        if self.temperatures is not None:
            good = all(math.isfinite(value) and value > 0 for value in self.temperatures)
            demand(good and len(self.temperatures) > 0, "temperatures", "above 0")
            one = self.tail == "none" or len(set(self.temperatures)) == 1
            demand(one, "temperatures", "one temperature when the tail is sampled")
        _check_runner(self.runner, self.workers, self.beam_options)

    def _check_effects(self) -> None:
        """Refuses options that would do nothing beside the others."""
        for option, needed, only in (
            ("exact", "tail", "sampled"),
            ("seed", "tail", "sampled"),
            ("mantissa_bits", "logprobs", "rounded"),
        ):
            value, found = getattr(self, option), getattr(self, needed)
            if value is not None and found != only:
                raise CaptureError(
                    f"--{option.replace('_', '-')} {value} is of --{needed} {only} and does "
                    f"nothing with --{needed} {found}. Leave it out, or give --{needed} {only}."
                )
        if self.tail == "sampled" and self.k < 2:
            raise CaptureError(
                "--k 1 with --tail sampled leaves no entry to draw: the one is the most likely "
                "token. Give --k 2 or more, or --tail none, which keeps exact entries alone."
            )
        if self.tail == "sampled" and self.captured_exact >= self.k:
            raise CaptureError(
                f"--exact {self.captured_exact} should be less than --k {self.k}: with --tail "
                "sampled at least one entry stands for all tokens that are not exact. Lower "
                "--exact, raise --k, or give --tail none, which keeps exact entries alone."
            )

    @property
    def captured_exact(self) -> int:
        """The least number of exact entries: all of --k without a sampled tail.

        With one, as given; else half of --k, at most 8 and at least 1: 8 from --k 16 on, so that
        something is drawn wherever there are more tokens than entries.
        """
        if self.tail == "none":
            return self.k
        return max(min(_MOST_EXACT, self.k // 2), 1) if self.exact is None else self.exact

    @property
    def captured_seed(self) -> int:
        """The seed of the sampled tail; 0 without one."""
        return 0 if self.seed is None else self.seed

    @property
    def captured_mantissa_bits(self) -> int:
        """Mantissa bits that `rounded` keeps; as if unset with another rounding."""
        return _MANTISSA_BITS if self.mantissa_bits is None else self.mantissa_bits

    @property
    def captured_temperatures(self) -> tuple[float, ...]:
        """The temperatures of the capture, ascending."""
        chosen = self.temperatures or _TEMPERATURES[self.tail]
        return tuple(sorted({float(value) for value in chosen}))

    def to_toml(self) -> str:
        """The options as a file that `read_options` reads; unset ones are left out."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return tomli_w.dumps(values)


@dataclass(frozen=True)
class AppendOptions:
    """Adds documents to a finished cache, with the teacher and the settings that it was made with.

    Readers that have the cache open keep what they had. Run the same command again after any
    interruption: it goes on where it stopped.

    Example: stillroom append cache --dataset more.jsonl
    """

    cache: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CACHE")]
    """The cache: a local path, gs://… or s3://…."""
    dataset: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")]
    """The documents to add: as of `stillroom precompute`."""

    # The corpus.
    name: str | None = None
    """Configuration of a hub dataset, or of a folder whose README.md names it. Unset: its
    default one."""
    split: str = "train"
    """Split of the dataset; of a folder, as `datasets` tells it by the names of files."""
    revision: str | None = None
    """Revision of a hub dataset; resolved to a commit. Unset: its newest."""
    column: str = "text"
    """Column that holds the text."""
    text_unit: Literal["file", "line"] | None = None
    """What is one document in a .txt file. Unset: file."""
    limit: int | None = None
    """Take only the first so many documents. Unset: all."""

    # The teacher.
    teacher: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH|MODULE:FUNCTION")] = None
    """Where the teacher is now; it must be the same one. Unset: where it was."""
    tokenizer: str | None = None
    """Where the tokenizer is. Unset: with the teacher."""

    # Work.
    workers: int = 1
    """Processes of the local runner on this machine. Each loads the teacher."""
    runner: str = LOCAL
    """local, or a Beam runner: DaskRunner, DataflowRunner, another name that Beam knows, or the
    full name of its class, such as package.module.Runner."""
    beam_options: str = ""
    """Beam's own options for another runner, in one string: "--project=p --region=r"."""
    keep_parts: bool = False
    """Keep the tokenised rows after the work."""

    def __post_init__(self) -> None:
        _check_runner(self.runner, self.workers, self.beam_options)


def _check_runner(runner: str, workers: int, beam_options: str) -> None:
    """Refuses options that the chosen runner does not heed.

    Raises:
      CaptureError: there are such, or `beam_options` cannot be taken apart.
    """
    if not runner.strip():
        raise CaptureError("--runner should be local or the name of a Beam runner, found nothing.")
    if runner == LOCAL and beam_options.strip():
        raise CaptureError(
            "--beam-options has no effect with the local runner. Leave it out, or name another "
            "--runner."
        )
    if runner != LOCAL and workers != 1:
        raise CaptureError(
            f"--workers {workers} has no effect with --runner {runner}: it is for the local "
            "runner. Leave it out; how many workers there are is among that runner's own options, "
            "for --beam-options."
        )
    try:
        shlex.split(beam_options)
    except ValueError as error:
        raise CaptureError(
            f"--beam-options should be written as on a command line, found {beam_options!r}: "
            f"{error}."
        ) from error


def read_options(path: str | Path) -> dict[str, Any]:
    """Options from a TOML file, as keyword arguments of `PrecomputeOptions`.

    Raises:
      CaptureError: no such file, not TOML, or an option that does not exist.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CaptureError(f"cannot read the config file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CaptureError(f"the config file {path} is not TOML: {error}.") from error
    known = {field.name for field in fields(PrecomputeOptions)}
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for name in _PATHS:
        if isinstance(values.get(name), str):
            # As a command line would give it, where paths are not taken to be UTF-8.
            values[name] = os.fsdecode(values[name].encode())
    unknown = sorted(set(values) - known)
    if unknown:
        raise CaptureError(
            f"the config file {path} has unknown options: {', '.join(unknown)}. "
            f"There are: {', '.join(sorted(known))}."
        )
    tables = sorted(name for name, value in values.items() if isinstance(value, dict))
    if tables:
        raise CaptureError(
            f"the config file {path} has a table for {', '.join(tables)}; expected a value, such "
            f"as {tables[0]} = …"
        )
    if isinstance(values.get("temperatures"), list):
        values["temperatures"] = tuple(values["temperatures"])
    return values


def joined_words(words: list[str]) -> list[str]:
    """Words in which `--beam-options VALUE` is one, for the value looks like an option itself."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--beam-options", "--beam_options"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def config_words(words: list[str]) -> list[str]:
    """Replaces `--config FILE` in a command line by the options of that file, put first.

    What stands on the command line itself comes later and wins.
    """
    words = joined_words(words)
    rest, path = list(words), None
    for index, word in enumerate(words):
        if word == "--config":
            if index + 1 == len(words):
                raise CaptureError("--config needs a file: a TOML file of options.")
            path, rest = words[index + 1], words[:index] + words[index + 2 :]
        elif word.startswith("--config="):
            path, rest = word.removeprefix("--config="), words[:index] + words[index + 1 :]
    if path is None:
        return rest
    given = {
        word.split("=")[0].removeprefix("--no-").removeprefix("--").replace("_", "-")
        for word in rest
        if word.startswith("--")
    }
    front = []
    for name, value in read_options(path).items():
        option = name.replace("_", "-")
        if option in given:
            continue
        if isinstance(value, bool):
            front.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            front += [f"--{option}", *map(str, value)]
        else:
            front.append(f"--{option}={value}")
    return [*front, *rest]
