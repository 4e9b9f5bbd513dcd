"""The folder of a run: what decides the run, who works on it, and what was asked each time.

RUN/run.json             everything that decides the run; written first, never changed
RUN/lock                 held by the process that trains; holds its pid
RUN/sessions/<n>.toml    all options of the n-th time that training was started
RUN/tokenizer/           the student's, and its generation_config.json: the run stands alone
RUN/checkpoints/         student.checkpoints
RUN/metrics.jsonl        one line for each step (student.metrics)
RUN/evaluations.jsonl    one line for each evaluation
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from cache.errors import CacheError
from cache.jsonfields import canonical, digest, parse_object
from student.errors import RunError

RUN, LOCK, SESSIONS, TOKENIZER = "run.json", "lock", "sessions", "tokenizer"
CHECKPOINTS, METRICS, EVALUATIONS = "checkpoints", "metrics.jsonl", "evaluations.jsonl"

_FORMAT = 1
_UNFINISHED = ".unfinished"
# What a start that was killed before it wrote run.json leaves behind.
_BEFORE_RUN = {LOCK, RUN + _UNFINISHED}
# Fields whose values tell a reader nothing: what their difference means.
_PLAIN = {
    "cache.identity": "the cache is another one",
    "model.fingerprint": "the student's first weights are others",
    "split": "other rows are held out, for copies were not looked for when the run began",
}


@dataclass(frozen=True)
class Run:
    """An open run; no other process can open it until this one closes it or ends.

    Attributes:
      folder: where it is.
      record: everything that decides the run, as stored.
      session: how often the run was started, this time included.
    """

    folder: Path
    record: dict[str, Any]
    session: int
    _lock: int

    @property
    def resumed(self) -> bool:
        """Whether the run was there before this session."""
        return self.session > 1

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    @property
    def evaluations(self) -> Path:
        return self.folder / EVALUATIONS

    def keep_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Stores the files of the student's tokenizer, and its generation_config.json."""
        (self.folder / TOKENIZER).mkdir(exist_ok=True)
        for name, data in files.items():
            (self.folder / TOKENIZER / name).parent.mkdir(exist_ok=True)
            _write(self.folder / TOKENIZER / name, data)

    def close(self) -> None:
        """Lets others open the run. Closing twice does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            object.__setattr__(self, "_lock", -1)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(folder: str | Path, record: Mapping[str, Any], options: Mapping[str, Any]) -> Run:
    """Begins a run, or goes on with the one that is in the folder.

    Args:
      folder: a local path; made if there is none.
      record: everything that decides the run: JSON values; objects may be nested.
      options: all options of this session, for the file in sessions/; those that are None are
        left out.

    Raises:
      RunError: another process works on the run, the record of the run there differs (every
        field that does is named), its run.json is damaged, or the folder holds something else.
        Nothing was changed on disk.
    """
    path = local_path(folder)
    wanted = json.loads(json.dumps(dict(record), allow_nan=False))
    _check_place(path)
    # Before the lock, so that a refused command leaves no file behind; and again under it.
    if (path / RUN).exists():
        _check_same(path, wanted)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(
            f"cannot write to the run {path} ({error}). Choose another --out, or allow writing "
            "there."
        ) from error
    try:
        _take(lock, path)
        _check_place(path)
        if (path / RUN).exists():
            _check_same(path, wanted)
        else:
            content = {"format": _FORMAT, "record": wanted, "sha256": digest(wanted)}
            _write(path / RUN, _text(json.dumps(content, indent=1, ensure_ascii=False)))
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        session = _begin_session(path / SESSIONS, options)
    except BaseException:
        os.close(lock)
        raise
    return Run(path, wanted, session, lock)


def read_run(folder: str | Path) -> dict[str, Any]:
    """The record of a run, also while it is trained.

    Raises:
      RunError: there is no run, or its run.json is damaged.
    """
    path = local_path(folder)
    try:
        data = (path / RUN).read_bytes()
    except FileNotFoundError as error:
        raise RunError(
            f"{path} holds no run: there is no {RUN}. Give the folder that `stillroom train` was "
            "given as --out."
        ) from error
    except OSError as error:
        raise RunError(f"cannot read the run {path} ({error}).") from error
    try:
        content = parse_object(data, RUN)
    except CacheError as error:
        raise _damaged(path, str(error)) from error
    version, record = content.get("format"), content.get("record")
    if isinstance(version, int) and version > _FORMAT:
        raise RunError(
            f"the run {path} was made by a newer Stillroom (its format is {version}, this one "
            f"knows {_FORMAT}). Update Stillroom."
        )
    if version != _FORMAT or not isinstance(record, dict):
        raise _damaged(path, 'it should hold "format" and "record"')
    if content.get("sha256") != digest(record):
        raise _damaged(path, "its digest is of another content")
    return record


def find_record(folder: str | Path) -> dict[str, Any] | None:
    """The record of the run in a folder, or None if none has begun there.

    Raises:
      RunError: the folder holds something else, or run.json is damaged.
    """
    path = local_path(folder)
    _check_place(path)
    return read_run(path) if (path / RUN).exists() else None


def last_options(folder: str | Path) -> dict[str, Any]:
    """The options of the last time that training was started; those that were None are missing.

    Raises:
      RunError: there are none.
    """
    sessions = local_path(folder) / SESSIONS
    files = [file for file in sessions.glob("*.toml") if file.stem.isdecimal()]
    if not files:
        raise RunError(f"{sessions} holds no options of a session. Was it removed?")
    newest = max(files, key=lambda file: int(file.stem))
    try:
        return tomllib.loads(newest.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{newest} is damaged: {error}. Put it back from a copy.") from error


def local_path(folder: str | Path) -> Path:
    """The folder as a path.

    Raises:
      RunError: it is a URL, or not UTF-8, which checkpoints cannot be saved to.
    """
    if "://" in str(folder):
        raise RunError(f"a run's folder should be a local path, found {str(folder)!r}.")
    try:
        str(Path(folder).absolute()).encode()
    except UnicodeEncodeError as error:
        raise RunError(
            f"a run's folder should have a name that is UTF-8, found {str(folder)!r}. Choose "
            "another; where the locale is not UTF-8, set PYTHONUTF8=1."
        ) from error
    return Path(folder)


def _damaged(path: Path, reason: str) -> RunError:
    return RunError(
        f"{path / RUN} is damaged: {reason}. Put the file back from a copy, or start again with "
        "another --out. Nothing was changed."
    )


def _check_place(path: Path) -> None:
    """Raises unless a run is there, or one can begin there."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"the run {path} should be a folder, found a file. Choose another --out.")
    names = {entry.name for entry in path.iterdir()}
    if RUN not in names and names - _BEFORE_RUN:
        raise RunError(
            f"{path} is not empty and holds no run: there is no {RUN}. Choose another --out. "
            "Nothing was changed."
        )


def _check_same(path: Path, wanted: dict[str, Any]) -> None:
    lines = list(_differences(read_run(path), wanted))
    if lines:
        text = "\n".join(f"  {line}" for line in lines)
        raise RunError(
            f"the run {path} is another one than you ask for now:\n{text}\n"
            "Ask for the same, or choose another --out. Nothing was changed."
        )


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    before, now = dict(_flat(found)), dict(_flat(wanted))
    for name in [*before, *(name for name in now if name not in before)]:
        if name in before and name in now and canonical(before[name]) == canonical(now[name]):
            continue
        label = name.replace("_", "-")
        if name in _PLAIN:
            yield f"{label}: {_PLAIN[name]}"
        else:
            yield f"{label}: the run has {_shown(before, name)}, you ask for {_shown(now, name)}"


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by dotted name. An empty object is a value."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock, 100, 0).decode(errors="replace").strip()
        who = f"process {pid}" if pid else "another process"
        raise RunError(
            f"the run {path} is in use by {who}. Wait until it ends, or stop it "
            f"(kill {pid or 'PID'}): it goes on from its newest checkpoint when it is started "
            "again. Nothing was changed."
        ) from error
    except OSError as error:
        raise RunError(
            f"cannot lock the run {path} ({error}). Choose an --out on a file system that has "
            "locks."
        ) from error


def _begin_session(folder: Path, options: Mapping[str, Any]) -> int:
    """Writes the session's options and returns its number, counted from 1."""
    folder.mkdir(exist_ok=True)
    done = [int(file.stem) for file in folder.glob("*.toml") if file.stem.isdecimal()]
    session = max(done, default=0) + 1
    given = {name: value for name, value in options.items() if value is not None}
    _write(folder / f"{session}.toml", _text(tomli_w.dumps(given)))
    return session


def _text(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _write(path: Path, data: bytes) -> None:
    """Writes a file that is there as a whole or not at all."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
