"""Stillroom's front door: the `stillroom` command, and the names that users import.

    import stillroom

    stillroom.precompute(stillroom.PrecomputeOptions(
        dataset="corpus.jsonl", teacher="models/teacher", out="cache"))
    cache = stillroom.open("cache")
    batch = cache.rows([0, 1, 2])
    stillroom.train(stillroom.TrainOptions(
        cache="cache", student="models/student", out="runs/first"))

Names are imported when first used, so that looking into a cache imports neither JAX nor Beam.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import importlib
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from cache.copying import Copied, copy
    from cache.derive import Derived, derive
    from cache.errors import CacheError, DamageError
    from cache.options import CopyOptions, DeriveOptions, InspectOptions, VerifyOptions
    from cache.reader import Cache, open
    from cache.summary import inspect
    from cache.verify import Report, verify
    from decoder.errors import DecoderError
    from pipelines.append import append
    from pipelines.audit import Audit, AuditOptions, audit
    from pipelines.compare import Comparison, compare
    from pipelines.compare_options import CompareOptions
    from pipelines.errors import PipelineError
    from pipelines.options import AppendOptions, PrecomputeOptions
    from pipelines.precompute import Outcome, precompute
    from student.errors import StudentError
    from student.evaluation import Evaluation
    from student.options import EvaluateOptions, ExportOptions, TrainOptions
    from student.train import Trained, train
    from student.trained import evaluate, export

__version__ = "0.1.0"

_HOMES = {
    "AppendOptions": "pipelines.options",
    "Audit": "pipelines.audit",
    "AuditOptions": "pipelines.audit",
    "Cache": "cache.reader",
    "CacheError": "cache.errors",
    "Copied": "cache.copying",
    "CopyOptions": "cache.options",
    "CompareOptions": "pipelines.compare_options",
    "Comparison": "pipelines.compare",
    "DamageError": "cache.errors",
    "DecoderError": "decoder.errors",
    "DeriveOptions": "cache.options",
    "Derived": "cache.derive",
    "EvaluateOptions": "student.options",
    "Evaluation": "student.evaluation",
    "ExportOptions": "student.options",
    "InspectOptions": "cache.options",
    "Outcome": "pipelines.precompute",
    "PipelineError": "pipelines.errors",
    "PrecomputeOptions": "pipelines.options",
    "Report": "cache.verify",
    "StudentError": "student.errors",
    "TrainOptions": "student.options",
    "Trained": "student.train",
    "VerifyOptions": "cache.options",
    "append": "pipelines.append",
    "audit": "pipelines.audit",
    "compare": "pipelines.compare",
    "copy": "cache.copying",
    "derive": "cache.derive",
    "evaluate": "student.trained",
    "export": "student.trained",
    "inspect": "cache.summary",
    "open": "cache.reader",
    "precompute": "pipelines.precompute",
    "train": "student.train",
    "verify": "cache.verify",
}

__all__ = [
    "AppendOptions",
    "Audit",
    "AuditOptions",
    "Cache",
    "CacheError",
    "CompareOptions",
    "Comparison",
    "Copied",
    "CopyOptions",
    "DamageError",
    "DecoderError",
    "DeriveOptions",
    "Derived",
    "EvaluateOptions",
    "Evaluation",
    "ExportOptions",
    "InspectOptions",
    "Outcome",
    "PipelineError",
    "PrecomputeOptions",
    "Report",
    "StudentError",
    "TrainOptions",
    "Trained",
    "VerifyOptions",
    "append",
    "audit",
    "compare",
    "copy",
    "derive",
    "evaluate",
    "export",
    "inspect",
    "main",
    "open",
    "precompute",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stillroom' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_USAGE = """\
usage: stillroom COMMAND …

Run a teacher over a corpus once, keep what students need of it, train any number of students.

  precompute   run a teacher over a corpus into a cache; resumes
  append       add documents to a finished cache, with the same teacher; resumes
  audit        score some rows of a cache again, and compare
  inspect      look into a cache: summary, a shard, a row, a position
  verify       check a cache: quickly, or every byte; repair it
  derive       cut, thin, round or join caches into a new one; resumes
  copy         copy a cache to another storage; resumes
  compare      compare capture settings: bytes per token, and what they lose
  train        train a student from a cache; resumes
  evaluate     measure a trained student on rows that it never saw
  export       write a trained student as a Hugging Face folder

`stillroom COMMAND --help` shows a command's options. `--debug` shows tracebacks."""


class _Interrupts:
    """Ctrl-C that is not lost, while a command runs; a context manager.

    Python raises KeyboardInterrupt wherever the main thread is. Where that is a callback of the
    garbage collector, a finaliser or native code, nobody can catch it: it is reported as
    unraisable and forgotten, and the command would go on. While a library is imported, it may
    become an error of that import.

    Outside the main thread, which alone gets signals, it does nothing. Whoever sets another
    handler meanwhile, as training does to save a checkpoint, gets the signals instead.

    Attributes:
      asked: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Interrupts:
        self._active = threading.current_thread() is threading.main_thread()
        # One that is ignored, as a shell does for what it starts in the background, stays so.
        self._active &= signal.getsignal(signal.SIGINT) != signal.SIG_IGN
        if self._active:
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._handler)
            sys.unraisablehook = self._hook

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def _unraisable(self, lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            # Raised from here it would be lost again; so in a moment, elsewhere.
            threading.Timer(0.05, _thread.interrupt_main).start()
        else:
            self._hook(lost)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line.

    Returns the exit code: 0, 1 (failed), 2 (usage), or 128 and the signal that stopped it, which
    is 130 after Ctrl-C.
    """
    from cache.visible import escape_what_cannot_be_written

    escape_what_cannot_be_written()
    if arguments is None:
        sys.excepthook = _trace
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    with _Interrupts() as interrupts:
        code = _main(words, debug, interrupts)
    if code >= _STOPPED and arguments is None:
        # Threads of native code may be at work still, which an ordinary exit crashes.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    return code


def _main(words: list[str], debug: bool, interrupts: _Interrupts) -> int:
    try:
        try:
            return _run(words)
        finally:
            # Here and not at the exit, where a reader that has gone would be a traceback.
            sys.stdout.flush()
    except KeyboardInterrupt as stopped:
        # Training says which signal it was.
        numbers = [each for each in stopped.args if isinstance(each, int)]
        return _stopped(words, *numbers)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if interrupts.asked and not debug:
            # Whatever was interrupted made an error of its own of it.
            return _stopped(words)
        if isinstance(error, UnicodeEncodeError) and not debug:
            _say(
                f"stillroom {words[0]}: {error.object!r} cannot be written as {error.encoding}. "
                "Use a name that is UTF-8; where the locale is another, set PYTHONUTF8=1."
            )
            return 1
        if debug or not isinstance(error, (*_user_errors(), OSError)):
            raise
        _say(f"stillroom {words[0]}: {error}")
        return 1


def _trace(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Shows a traceback, in whose messages there may be anything, too."""
    _say("".join(traceback.format_exception(error)).rstrip())


def _stopped(words: list[str], number: int = signal.SIGINT) -> int:
    resumes = bool(words) and words[0] in _RESUMES
    again = " Run the same command again: it goes on where it stopped." if resumes else ""
    _say(f"\nStopped.{again}")
    return _STOPPED + number


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        _show(_USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        _show(f"stillroom {__version__}")
        return 0
    if words[0] not in _COMMANDS:
        _say(f"stillroom: there is no command {words[0]!r}\n\n{_USAGE}")
        return 2
    return _COMMANDS[words[0]](words[1:])


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors whose text says what to do; a traceback would only hide it."""
    from cache.errors import CacheError
    from decoder.errors import DecoderError
    from pipelines.errors import PipelineError
    from student.errors import StudentError

    return CacheError, DecoderError, PipelineError, StudentError


def _precompute(words: list[str]) -> int:
    # Before Beam is imported, which otherwise logs every stage of a pipeline.
    import logging

    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    from pipelines.options import PrecomputeOptions, config_words

    options = _parse(PrecomputeOptions, "precompute", config_words(words))
    from pipelines.precompute import precompute

    return _print_capture(precompute(options))


def _append(words: list[str]) -> int:
    import logging

    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    from pipelines.options import AppendOptions, joined_words

    options = _parse(AppendOptions, "append", joined_words(words))
    from pipelines.append import append

    return _print_capture(append(options))


def _print_capture(outcome: Any) -> int:
    from cache.show import render
    from cache.summary import summary

    done = f"scored {outcome.scored} shards" if outcome.scored else "already complete"
    _show(f"{outcome.cache.location}: {done}")
    for note in outcome.notes:
        _show(note)
    _show(render(summary(outcome.cache.location)))
    return 0


def _audit(words: list[str]) -> int:
    from pipelines.audit import AuditOptions, audit, render

    options = _parse(AuditOptions, "audit", words)
    from cache.progress import counted

    with counted("Scoring again") as progress:
        found = audit(options, progress)
    if options.json:
        _show_json(found.to_json())
    else:
        _show(render(found))
    return 0 if found.sound else 1


def _inspect(words: list[str]) -> int:
    from cache.options import InspectOptions
    from cache.show import render
    from cache.summary import inspect

    options = _parse(InspectOptions, "inspect", words)
    view = inspect(options)
    if options.json:
        _show_json(view)
    else:
        _show(render(view))
    shards = view.get("shards", {})
    broken = view["view"] == "summary" and view["state"] == "complete"
    return 1 if broken and (shards["missing"] or shards["damaged"]) else 0


def _verify(words: list[str]) -> int:
    from cache.options import VerifyOptions
    from cache.progress import counted
    from cache.show import render_report
    from cache.verify import verify

    options = _parse(VerifyOptions, "verify", words)
    with counted("Verifying") as progress:
        report = verify(options.cache, full=options.full, repair=options.repair, progress=progress)
    if options.json:
        _show_json({**dataclasses.asdict(report), "sound": report.sound})
    else:
        _show(render_report(report))
    return 0 if report.sound else 1


def _compare(words: list[str]) -> int:
    from pipelines.compare_options import CompareOptions

    options = _parse(CompareOptions, "compare", words)
    from pipelines.compare import compare, recommend
    from pipelines.compare_show import check_plot, draw, render, render_recommendation, to_json

    if options.plot is not None:
        check_plot(options.plot)
    found = compare(options)
    best = None
    if options.budget is not None:
        best = recommend(found.measured, options.budget, found.batch)
    if options.plot is not None:
        draw(found, options.plot)
    if options.json:
        _show_json(to_json(found, best), allow_nan=False)
    else:
        _show(render(found, options.renormalise, options.all))
        if best is not None:
            _show(f"\n{render_recommendation(best, found.batch)}")
    return 1 if best is not None and best.step is None else 0


def _derive(words: list[str]) -> int:
    from cache.derive import derive
    from cache.options import DeriveOptions
    from cache.show import render
    from cache.summary import summary

    derived = derive(_parse(DeriveOptions, "derive", words))
    done = f"made {derived.made} shards" if derived.made else "already complete"
    _show(f"{derived.cache.location}: {done}")
    _show(render(summary(derived.cache.location)))
    return 0


def _copy(words: list[str]) -> int:
    from cache.copying import copy
    from cache.options import CopyOptions
    from cache.progress import counted

    options = _parse(CopyOptions, "copy", words)
    with counted("Copying", (1_000_000, "MB")) as progress:
        copied = copy(options.source, options.destination, progress=progress)
    present = (
        f", {copied.present} were there already (by receipt and size)" if copied.present else ""
    )
    _show(
        f"{copied.location}: copied {copied.shards - copied.present} of {copied.shards} shards "
        f"({copied.bytes / 1e6:,.1f} MB){present}"
    )
    return 0


def _train(words: list[str]) -> int:
    from student.options import TrainOptions

    options = _parse(TrainOptions, "train", words)
    from student.display import table
    from student.train import train

    trained = train(options)
    done = f"{trained.steps:,} steps" if trained.steps else "already complete"
    _show(f"{trained.run}: {done}")
    if trained.evaluations:
        _show(table(trained.evaluations))
    _show(f"Checkpoints, metrics.jsonl and evaluations.jsonl are in {trained.run}.")
    return 0


def _evaluate(words: list[str]) -> int:
    from student.options import EvaluateOptions

    options = _parse(EvaluateOptions, "evaluate", words)
    from cache.progress import counted
    from student.display import table
    from student.trained import evaluate

    with counted("Evaluating") as progress:
        step, found = evaluate(options, _say, progress)
    line = {"step": step, **found.to_json()}
    if options.json:
        _show_json(line)
        return 0
    _show(f"{options.run}, step {step}: {found.labels:,} labels of {found.rows:,} held-out rows")
    _show(table([line]))
    _show(f"KL over what the cache holds ({found.kl_kind})")
    if found.kl_full is not None:
        _show(f"KL over the whole vocabulary: {found.kl_full:.4f}")
    _show(f"the teacher's own perplexity: {found.teacher_perplexity:,.2f}")
    return 0


def _export(words: list[str]) -> int:
    from student.options import ExportOptions

    options = _parse(ExportOptions, "export", words)
    from student.trained import export

    trained = export(options)
    for warning in trained.warnings:
        _say(f"Warning: {warning}.")
    _show(f"{options.out}: the student of {options.run} after step {trained.step}")
    return 0


def _show(text: str) -> None:
    from cache.visible import show

    show(text)


def _show_json(value: Any, allow_nan: bool = True) -> None:
    from cache.visible import as_json, show

    show(as_json(value, allow_nan))


def _say(text: str) -> None:
    from cache.visible import say

    say(text)


_Options = TypeVar("_Options")


def _parse(options: type[_Options], command: str, words: list[str]) -> _Options:
    """Options from the words of a command line; prints help or usage errors itself."""
    from cache.arguments import parse

    try:
        return parse(options, f"stillroom {command}", words)
    except _user_errors() as error:
        _say(f"stillroom {command}: {error}\n`stillroom {command} --help` shows the options.")
        raise SystemExit(2) from error


# With the signal's number the exit code of a command that it stopped, as shells have it; and the
# commands that then go on where they were.
_STOPPED = 128
_RESUMES = ("precompute", "append", "derive", "copy", "train")
_COMMANDS = {
    "precompute": _precompute,
    "append": _append,
    "audit": _audit,
    "inspect": _inspect,
    "verify": _verify,
    "derive": _derive,
    "copy": _copy,
    "compare": _compare,
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
}


if __name__ == "__main__":
    sys.exit(main())
