"""Fresh rows with a teacher, for `stillroom compare`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decoder
from decoder.rows import positions_from_segments
from pipelines.begin import what_is_wanted
from pipelines.compare_beyond import DenseBeyond
from pipelines.compare_measure import Positions
from pipelines.compare_options import CompareOptions
from pipelines.compare_targets import Chunk
from pipelines.encode import encode_documents
from pipelines.errors import CorpusError, TeacherError
from pipelines.layout import lay_rows
from pipelines.sampling import position_bits
from pipelines.scoring import teacher_functions
from pipelines.targets import TargetSettings, select_targets

Rows = Mapping[str, np.ndarray]
Progress = Callable[[int, int], None]

_ROW_ARRAYS = ("tokens", "segments", "documents", "label_mask")
# Positions whose distributions over the vocabulary exist at one time.
_CHUNK = 64


class Predictions:
    """A model's logits at every position of some rows, computed from its kept hidden states.

    A model without a head of its own is run again whenever its logits are asked for.
    """

    def __init__(
        self, model: Any, rows: Rows, vocabulary: int, holes: Sequence[int], progress: Progress
    ):
        """Runs the model over all rows.

        Args:
          model: an NNX model of one row, with or without a method `unembed`.
          rows: tokens and segments, each [row, position].
          vocabulary: number of real token ids; `holes` of them have no token.
          progress: called with (rows done, rows in all).
        """
        functions, self._params = teacher_functions(model)
        legal = np.ones(vocabulary, bool)
        legal[list(holes)] = False
        self._tokens = rows["tokens"].astype(np.int32)
        self._segments = rows["segments"].astype(np.int32)
        self._run = jax.jit(functions.hidden)

        @jax.jit
        def logits(params: Any, part: Any) -> Any:
            found = part if functions.unembed is None else functions.unembed(params, part)
            found = found[:, :vocabulary].astype(jnp.float32)
            return jnp.where(jnp.asarray(legal)[None, :], found, -jnp.inf)

        self._logits = logits
        self._last: tuple[int, np.ndarray] | None = None
        self._hidden: list[np.ndarray] | None = None
        if functions.unembed is not None:
            self._hidden = []
            for row in range(len(self._tokens)):
                self._hidden.append(self._states(row))
                progress(row + 1, len(self._tokens))

    def logits(self, row: int, start: int) -> Any:
        """float32 [chunk, vocabulary] of the positions from `start` on, zeros behind the row."""
        if self._hidden is not None:
            states = self._hidden[row]
        else:
            if self._last is None or self._last[0] != row:
                self._last = row, self._states(row)
            states = self._last[1]
        part = states[start : start + _CHUNK]
        missing = _CHUNK - len(part)
        return self._logits(self._params, np.pad(part, ((0, missing), (0, 0))))

    def _states(self, row: int) -> np.ndarray:
        segments = jnp.asarray(self._segments[row])
        places = positions_from_segments(segments)
        return np.asarray(self._run(self._params, self._tokens[row], segments, places))


# Settings and seed are static: compiled once for each, whichever sample asks.
_select = jax.jit(select_targets, static_argnums=2)
_bits = jax.jit(position_bits, static_argnums=0)


@jax.jit
def _log_softmax(logits):
    return jax.nn.log_softmax(logits, axis=-1)


class TeacherSample:
    """Rows with the teacher's whole distribution at every position; see `Sample`."""

    def __init__(
        self,
        teacher: Predictions,
        rows: Rows,
        vocabulary: int,
        temperatures: tuple[float, ...],
        seed: int = 0,
        student: Predictions | None = None,
    ):
        """Args:
        teacher, student: of the same rows; without a student, gradients are measured at the
          teacher's mean distribution over all labels of the sample.
        rows: tokens, segments, documents, label_mask, each [row, position].
        seed: of sampled tails.
        """
        self._teacher, self._student, self._laid, self._seed = teacher, student, rows, seed
        self.vocabulary, self.temperatures = vocabulary, temperatures
        self.rows, self.length = rows["tokens"].shape
        self.tokens = int(np.count_nonzero(rows["segments"]))
        self._frequencies = self._log_mean("teacher", teacher)
        if student is not None:
            self._log_mean("student", student)

    def chunks(self, k: int, tails: Sequence[tuple[int, int]]) -> Iterator[Chunk]:
        """See `Sample.chunks`."""
        exact = TargetSettings(k, self.vocabulary, "none", temperatures=self.temperatures)
        draws = {
            (entries, least): TargetSettings(entries, self.vocabulary, "sampled", exact=least)
            for entries, least in tails
        }
        for row, start, rows in self._pieces():
            logits = self._teacher.logits(row, start)
            places = start + np.arange(_CHUNK, dtype=np.int32)
            labels = _following(self._laid["tokens"][row], start)
            n = rows["tokens"].shape[1]
            drawn = {}
            if draws:
                bits = _bits(self._seed, np.int32(row), places)
                drawn = {
                    key: _targets(_select(logits, labels, settings, bits), n)
                    for key, settings in draws.items()
                }
            listed = _targets(_select(logits, labels, exact), n)
            where = np.flatnonzero(rows["label_mask"][0])
            positions = self._positions(logits, row, start, listed, where)
            yield Chunk(row, rows, listed, drawn, where, positions)

    def _pieces(self) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
        """Row, start and the rows' arrays [1, n] of every chunk, in order."""
        for row in range(self.rows):
            for start in range(0, self.length, _CHUNK):
                part = (slice(row, row + 1), slice(start, start + _CHUNK))
                yield row, start, {name: self._laid[name][part] for name in _ROW_ARRAYS}

    def _positions(
        self, logits: Any, row: int, start: int, listed: Rows, where: np.ndarray
    ) -> Positions:
        log_p = _log_softmax(logits)
        if self._student is not None:
            log_q = _log_softmax(self._student.logits(row, start))
        else:
            log_q = jnp.broadcast_to(self._frequencies, log_p.shape)
        ids = np.full((_CHUNK, listed["ids"].shape[-1]), -1, np.int32)
        ids[: listed["ids"].shape[1]] = listed["ids"][0]
        logprobs = listed["logprobs"][0, where].astype(np.float64)
        present = ids[where] >= 0
        at_ids = jnp.take_along_axis(log_q, jnp.maximum(jnp.asarray(ids), 0), axis=1)
        return Positions(
            ids=np.where(present, ids[where], 0),
            p=np.where(present, np.exp(logprobs), 0.0),
            log_q=np.where(present, np.asarray(at_ids)[where].astype(np.float64), 0.0),
            beyond=DenseBeyond(log_p, log_q, ids, where),
        )

    def _log_mean(self, name: str, model: Predictions) -> np.ndarray:
        """Log of the model's mean distribution over the labels, float32 [vocabulary].

        Raises:
          TeacherError: logits that are not numbers.
        """
        total = np.zeros(self.vocabulary)
        for row, start, rows in self._pieces():
            mask = np.zeros(_CHUNK, bool)
            mask[: rows["label_mask"].shape[1]] = rows["label_mask"][0] == 1
            sums, normalisers = _weighted(model.logits(row, start), mask)
            wrong = np.flatnonzero(~np.isfinite(np.asarray(normalisers)) & mask)
            if len(wrong):
                raise TeacherError(
                    f"the {name}'s logits are not numbers at row {row}, position "
                    f"{start + int(wrong[0])} of the sample. Check its weights, or use "
                    "--precision float32."
                )
            total += np.asarray(sums)
        with np.errstate(divide="ignore"):
            return np.log(total / np.count_nonzero(self._laid["label_mask"])).astype(np.float32)


@jax.jit
def _weighted(logits, mask):
    """Sum of the distributions where the mask is true, and every position's normaliser."""
    p = jnp.where(mask[:, None], jnp.exp(jax.nn.log_softmax(logits, axis=-1)), 0.0)
    return jnp.sum(p, axis=0), jax.nn.logsumexp(logits, axis=-1)


def _following(tokens: np.ndarray, start: int) -> np.ndarray:
    """int32 [chunk]: the token after each position, -1 where there is none."""
    part = tokens[start + 1 : start + 1 + _CHUNK].astype(np.int32)
    return np.pad(part, (0, _CHUNK - len(part)), constant_values=-1)


def _targets(found: Any, n: int) -> dict[str, np.ndarray]:
    """Targets of the first n positions, [1, n, …]."""
    values = {name: np.asarray(value)[None, :n] for name, value in found._asdict().items()}
    del values["finite"]
    return values


def fresh_rows(options: CompareOptions) -> tuple[Rows, int, tuple[int, ...]]:
    """Rows of documents chosen by the seed, laid out as a capture does; vocabulary and holes.

    Raises:
      PipelineError, DecoderError: what is wrong and what to do.
    """
    with tempfile.TemporaryDirectory(prefix="stillroom-compare-") as folder:
        # Opens and checks everything that a capture would, and writes nothing.
        wanted = what_is_wanted(options.capture(str(Path(folder) / "none")))
    parts, vocabulary = wanted.plan.parts, wanted.manifest.encoding.vocabulary
    layout = parts.layout
    tokenizer = decoder.load_tokenizer(
        options.tokenizer or options.teacher or "",
        None if options.tokenizer else options.teacher_revision,
    )
    order = np.random.default_rng(options.seed).permutation(len(wanted.corpus)).tolist()
    documents: list[np.ndarray] = []
    found, size = 0, 16
    most = max(options.rows // 8, 1) * layout.length
    while order and found < options.rows * layout.length:
        chosen, order, size = order[:size], order[size:], 2 * size
        for number in chosen:
            encoded = encode_documents(
                wanted.corpus.texts(number, number + 1),
                tokenizer,
                bos=parts.bos,
                eos=parts.eos,
                first_document=number,
                column=options.column,
                vocabulary=vocabulary,
            )
            # No document is most of the sample.
            documents.append(encoded.ids[0][:most])
            used = len(documents[-1])
            found += max(used, layout.length) if layout.kind == "pad" else used
            if found >= options.rows * layout.length:
                break
    laid = lay_rows(documents, 0, layout)
    rows = {name: getattr(laid, name)[: options.rows] for name in _ROW_ARRAYS}
    if not rows["label_mask"].any():
        raise CorpusError(
            "the sample has nothing to predict: its documents are empty or of one token. Check "
            "--dataset and --column, or take more --rows."
        )
    return rows, vocabulary, wanted.plan.holes


def check_student(options: CompareOptions, rows: int, vocabulary: int) -> None:
    """Refuses a student that does not read the teacher's tokens.

    Args:
      rows: of the student's head.
      vocabulary: of the comparison.
    """
    student = options.student or ""
    if decoder.has_tokenizer(student):
        own = decoder.load_tokenizer(student)
        theirs = decoder.load_tokenizer(
            options.tokenizer or options.teacher or "",
            None if options.tokenizer else options.teacher_revision,
        )
        difference = own.mapping_difference(theirs)
        if difference:
            raise TeacherError(
                f"the student {student} does not read the teacher's tokens: {difference}. Use a "
                "student with the teacher's tokenizer."
            )
    if rows < vocabulary:
        raise TeacherError(
            f"the student {student} has {rows} logits per position and the vocabulary "
            f"{vocabulary} tokens. Use a student with the teacher's tokenizer, or --vocabulary "
            f"{rows}."
        )
