"""Checkpoints: written whole or not at all, and restored only if every byte is what was saved.

    CHECKPOINTS/<step>/state/             the arrays, by Orbax
    CHECKPOINTS/<step>/checkpoint.json    position, metrics, digests of every array and file

Arrays are stored as they are, without a device axis and without a word about devices, so that
a checkpoint of any number of devices is restored onto any other. A step's folder gets its name
when all of it is on disk.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from student.checkpoint_files import (
    PARAMETERS,
    STATE,
    DamageError,
    check_files,
    check_leaves,
    describe,
    flatten,
    named,
    place,
    read_record,
    sync,
    write_record,
)
from student.errors import RunError

# A folder that is being written or removed, and the one that a new one of that step replaces.
_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_NAME = re.compile(rf"(\d+)({re.escape(_UNFINISHED)}|{re.escape(_REPLACED)})?")


@dataclass(frozen=True)
class Restored:
    """A checkpoint, read back.

    Attributes:
      step: the step after which it was saved.
      state: a pytree as the one asked for, of arrays on the devices asked for.
      position: as saved.
      metrics: as saved; None if there were none.
      warnings: newer checkpoints that were left out, and why.
    """

    step: int
    state: Any
    position: dict[str, Any]
    metrics: dict[str, Any] | None
    warnings: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run. One process saves; others may restore meanwhile."""

    def __init__(self, folder: str | Path, keep: int = 3, keep_best: bool = True):
        """Touches nothing.

        Args:
          folder: made at the first save.
          keep: how many of the newest to keep.
          keep_best: keep the one of least `metrics["loss"]`, too.
        """
        self._folder = Path(folder).resolve()
        self._keep = keep
        self._keep_best = keep_best
        # Steps that `restore` found damaged; removed at the next save.
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, sound or not, ascending."""
        return sorted(self._paths())

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        position: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves a checkpoint; it is on disk when this returns, and what is too old is removed.

        A process that is killed at any moment leaves the checkpoints before it as they were. A
        checkpoint of the same step is replaced.

        Args:
          step: how many steps were done.
          state: pytrees of arrays by name: "parameters", "optimizer".
          position: JSON: where to go on.
          metrics: numbers or None; with "loss", if this checkpoint can be the best. Numbers that
            are not finite are saved as None.
        """
        host = jax.tree.map(np.asarray, flatten(state))
        finite = {
            name: value if math.isfinite(value) else None for name, value in (metrics or {}).items()
        }
        record = {
            "step": step,
            "position": dict(position),
            "metrics": None if metrics is None else finite,
            "leaves": {name: describe(leaf) for name, leaf in named(host)},
        }
        unfinished = self._folder / f"{step}{_UNFINISHED}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            with _quiet(), _checkpointer() as checkpointer:
                checkpointer.save(unfinished / STATE, args=ocp.args.PyTreeSave(host))
            write_record(unfinished, record)
        except Exception as error:  # a full disk can raise anything
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = str(error).strip().split("\n")[0][:300]
            raise RunError(
                f"the checkpoint of step {step} could not be saved in {self._folder} "
                f"({type(error).__name__}: {reason}). Free some space, or allow writing, then "
                "run the same command again: it goes on from the newest checkpoint."
            ) from error
        self._put(unfinished, step)
        self._damaged.discard(step)
        self._remove_old()

    def restore(self, abstract: Mapping[str, Any], step: int | None = None) -> Restored | None:
        """The newest sound checkpoint, or the one of a step.

        Args:
          abstract: the state, with `jax.ShapeDtypeStruct` (or arrays) in place of arrays; each
            restored array gets the sharding of its own, if that has one.
          step: only this one.

        Returns:
          None if there are no checkpoints.

        Raises:
          RunError: there are checkpoints and none is sound; or not the one of the step.
        """
        if not self._paths() and step is None:
            return None
        return self._newest(abstract) if step is None else self._one(abstract, step)

    def restore_parameters(self, abstract: Any, which: str | int = "last") -> Restored:
        """The parameters of a checkpoint, without the rest of its state.

        Args:
          abstract: the parameters, as in `restore`.
          which: "last" (the newest sound one), "best" (least loss), or a step.

        Returns:
          `state` is a pytree as `abstract`.

        Raises:
          RunError: there is no such checkpoint (names those that are there), or it is damaged.
        """
        wanted = {PARAMETERS: abstract}
        if which == "last":
            if not self._paths():
                raise RunError(f"{self._folder} holds no checkpoint yet. Train the student first.")
            found = self._newest(wanted)
        elif which == "best":
            losses, damaged = self._losses()
            best = _best(losses)
            unknown = tuple(
                f"the checkpoint of step {step} is damaged ({reason}), best or not"
                for step, reason in damaged.items()
            )
            if best is None and unknown:
                raise RunError(f"no checkpoint can be the best: {'; '.join(unknown)}.")
            if best is None:
                raise RunError(
                    f"no checkpoint in {self._folder} has a held-out loss, so none is the best; "
                    f"{self._there()}. Take the last, or one of these."
                )
            found = self._one(wanted, best)
            found = replace(found, warnings=unknown)
        else:
            found = self._one(wanted, int(which))
        return Restored(
            found.step, found.state[PARAMETERS], found.position, found.metrics, found.warnings
        )

    def _newest(self, abstract: Mapping[str, Any]) -> Restored:
        reasons: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                found = self._read(step, abstract)
            except DamageError as error:
                reasons[step] = str(error)
                continue
            self._damaged |= set(reasons)
            warnings = (
                f"the checkpoint of step {bad} is damaged ({reason}) and left out; that of step "
                f"{step} is used"
                for bad, reason in reasons.items()
            )
            return Restored(step, *found, tuple(warnings))
        lines = "\n".join(f"  step {step}: {reason}" for step, reason in reasons.items())
        raise RunError(
            f"none of the checkpoints in {self._folder} can be used:\n{lines}\n"
            "Put one back from a copy, or start again with another --out. Nothing was changed."
        )

    def _one(self, abstract: Mapping[str, Any], step: int) -> Restored:
        if step not in self._paths():
            raise RunError(
                f"{self._folder} holds no checkpoint of step {step}; {self._there()}. "
                "Choose one of these."
            )
        try:
            return Restored(step, *self._read(step, abstract), ())
        except DamageError as error:
            raise RunError(
                f"the checkpoint of step {step} in {self._folder} is damaged ({error}); "
                f"{self._there()}. Choose another one."
            ) from error

    def _there(self) -> str:
        steps = ", ".join(map(str, self.steps()))
        return f"there are checkpoints of steps {steps}" if steps else "there is none at all"

    def _read(
        self, step: int, abstract: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
        """State, position and metrics of one checkpoint."""
        path = self._paths()[step]
        content = read_record(path, step)
        wanted = flatten(abstract)
        check_leaves(content["leaves"], wanted)
        check_files(path, content)
        like = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=like, partial_restore=True)
        try:
            with _quiet(), _checkpointer() as checkpointer:
                host = checkpointer.restore(path / STATE, args=arguments)
        except Exception as error:  # damage can raise anything
            reason = str(error).strip().split("\n")[0][:200]
            raise DamageError(f"reading it failed: {type(error).__name__}: {reason}") from error
        for name, leaf in named(host):
            if describe(leaf) != content["leaves"][name]:
                raise DamageError(f"the bytes of {name} are not those that were saved")
            if name.startswith(f"{PARAMETERS}/") and not np.isfinite(leaf).all():
                raise DamageError(f"{name} holds numbers that are not finite")
        return place(host, abstract), content["position"], content["metrics"]

    def _paths(self) -> dict[int, Path]:
        """Where each step's checkpoint is."""
        found: dict[int, Path] = {}
        if not self._folder.is_dir():
            return found
        for entry in self._folder.iterdir():
            match = _NAME.fullmatch(entry.name)
            if match and match[2] != _UNFINISHED:
                # One that was to be replaced stands in until the new one has its name.
                step, whole = int(match[1]), match[2] is None
                found[step] = entry if whole else found.get(step, entry)
        return found

    def _losses(self) -> tuple[dict[int, float | None], dict[int, str]]:
        """The loss, if it has one, of each checkpoint whose files are all there; what the others
        lack."""
        found: dict[int, float | None] = {}
        damaged: dict[int, str] = {}
        for step, path in sorted(self._paths().items()):
            try:
                metrics = read_record(path, step)["metrics"]
            except DamageError as error:
                damaged[step] = str(error)
            else:
                found[step] = (metrics or {}).get("loss")
        return found, damaged

    def _put(self, unfinished: Path, step: int) -> None:
        """Gives a finished checkpoint its name."""
        final = self._folder / str(step)
        replaced = self._folder / f"{step}{_REPLACED}"
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        sync(self._folder)
        if replaced.exists():
            _remove(replaced)

    def _clean(self) -> None:
        """Finishes or removes what a killed process left behind."""
        for entry in list(self._folder.iterdir()):
            match = _NAME.fullmatch(entry.name)
            if match is None or match[2] is None:
                continue
            final = self._folder / match[1]
            if match[2] == _REPLACED and not final.exists():
                entry.rename(final)
            else:
                shutil.rmtree(entry)

    def _remove_old(self) -> None:
        losses, _ = self._losses()
        sound = sorted(losses.keys() - self._damaged)
        kept: set[int | None] = set(sound[-self._keep :])
        if self._keep_best:
            kept.add(_best({step: losses[step] for step in sound}))
        paths = self._paths()
        # Damaged ones that `restore` did not name stay for it to name.
        for step in sorted((losses.keys() | self._damaged) & paths.keys() - kept):
            _remove(paths[step])
        self._damaged.clear()


def _best(losses: Mapping[int, float | None]) -> int | None:
    """The step of least loss; of equal ones the newest."""
    known = [(loss, -step) for step, loss in losses.items() if loss is not None]
    return -min(known)[1] if known else None


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly compress (8 %), and compressing takes half as long again.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _remove(path: Path) -> None:
    """Removes a checkpoint; half of one is never taken for damage."""
    step = path.name.removesuffix(_REPLACED)
    doomed = path.with_name(f"{step}{_UNFINISHED}")
    path.rename(doomed)
    shutil.rmtree(doomed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's notes to its developers off the screen."""

    def wanted(entry: logging.LogRecord) -> bool:
        return entry.levelno >= logging.ERROR or "orbax" not in entry.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
