"""Train: a cache and a student in, a run with checkpoints and metrics out; resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cache.progress import counted
from cache.visible import say as to_standard_error
from student.batches import BatchSettings
from student.checkpoints import Checkpoints, Restored
from student.display import Display, Moment
from student.errors import RunError, StudentError, TrainingError
from student.evaluation import Evaluation, kl_objective, make_row_sums, mean_over
from student.functions import StudentFunctions, parameters_of, student_functions
from student.input import TrainingInput, held_out_batches
from student.loop import Done, StopRequest, run_steps
from student.metrics import MetricsFile, read_metrics
from student.optimiser import alpha, learning_rate, make_optimizer
from student.options import TrainOptions
from student.plan import Plan, cache_place, decides, make_plan, notes
from student.run import Run, find_record, open_run
from student.step import State, make_step, place, replicate
from student.students import Student, build, legal_of, rebuild
from student.tracking import Trackers, open_trackers

# Rows that are evaluated at once on each device; decides no result.
_EVALUATION_ROWS = 2


@dataclass(frozen=True)
class Trained:
    """What `train` did.

    Attributes:
      run: the run's folder.
      steps: done in this session; 0 if the run was finished already.
      evaluations: of the whole run, one dictionary each, with "step" and "epoch".
    """

    run: Path
    steps: int
    evaluations: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class _Ready:
    """A run that is open and a student that is ready to be trained."""

    plan: Plan
    run: Run
    checkpoints: Checkpoints
    functions: StudentFunctions
    legal: np.ndarray | None
    parameters: dict[str, Any]  # of the student as it was built, or their shapes
    begins: bool  # whether there is no checkpoint to go on from


def train(options: TrainOptions, say: Callable[[str], None] | None = None) -> Trained:
    """Trains a student from a cache, or goes on with an unfinished run.

    Args:
      options: what to train; see there.
      say: takes lines for the user; standard error if None.

    Raises:
      StudentError, CacheError, DecoderError: what is wrong and what to do. Checkpoints that were
        saved stay.
      KeyboardInterrupt: stopped by Ctrl-C, SIGTERM or SIGHUP, which is its argument, after saving
        a checkpoint.
    """
    say = say or to_standard_error
    with counted("Reading which rows share documents") as progress:
        plan = make_plan(options, progress, identity=_cache_of(options.out))
    with ExitStack() as stack:
        ready = _prepare(plan, say)
        stack.enter_context(ready.run)
        return _Session(ready, say).go()


def _cache_of(folder: str) -> str | None:
    """The identity of the cache that the run in a folder began with; None if none has begun."""
    record = find_record(folder) or {}
    known = record.get("cache")
    return known.get("identity") if isinstance(known, dict) else None


def _prepare(plan: Plan, say: Callable[[str], None]) -> _Ready:
    """Opens the run, and builds the student unless there is a checkpoint of it."""
    options, asked = plan.options, decides(plan)
    place = {**asdict(options), "cache": cache_place(plan.cache)}
    found = find_record(options.out)
    student = None
    if found is None:
        student = _build(plan, say)
        record = student.record
    else:
        record = found.get("model")
        if not isinstance(record, dict):
            raise RunError(f"the run {options.out} does not say what its student is.")
    run = open_run(options.out, {**asked, "model": record}, place)
    try:
        checkpoints = Checkpoints(run.checkpoints, options.keep, options.keep_best)
        if student is None and not checkpoints.steps():
            # It was stopped before its first checkpoint: begin again, with the same student.
            student = _build(plan, say)
            if student.record != record:
                raise RunError(
                    f"the student {options.student} is another one than when the run "
                    f"{options.out} began. Bring back its files, or choose another --out."
                )
        if student is not None:
            run.keep_tokenizer(student.files)
        model = rebuild(record) if student is None else student.model
        functions = student_functions(model, options.remat)
        begins, parameters = student is not None, parameters_of(model)
        if not begins:
            parameters = jax.eval_shape(lambda x: x, parameters)
        return _Ready(plan, run, checkpoints, functions, legal_of(record), parameters, begins)
    except BaseException:
        run.close()
        raise


def _build(plan: Plan, say: Callable[[str], None]) -> Student:
    rows = plan.cache.encoding.vocabulary

    def batches() -> Any:
        if not len(plan.split.held_out):
            raise StudentError(
                f"--drop-layers {plan.options.drop_layers} finds the block by the loss on held-out "
                "rows, and --held-out 0 leaves none. Hold some out, or say which: FIRST-LAST."
            )
        settings = BatchSettings(rows, plan.options.length, targets=False)
        return held_out_batches(plan.cache, plan.split.held_out, settings, _EVALUATION_ROWS)

    with counted("Looking for the layers to drop") as progress:
        student = build(plan.options, plan.cache, batches, progress)
    if student.search is not None:
        first, last = student.search.first, student.search.last
        best = min(student.search.cross_entropies)
        say(f"Dropping layers {first}-{last}: held-out cross-entropy {best:.3f} without them.")
    layers = "" if student.layers is None else f", {student.layers} layers"
    say(f"Student: {student.parameters / 1e6:.1f} million parameters{layers}.")
    return student


class _Session:
    """One session of a run, from its newest checkpoint to its end."""

    def __init__(self, ready: _Ready, say: Callable[[str], None]):
        self._ready, self._say = ready, say
        self._plan, self._options = ready.plan, ready.plan.options
        plan = self._plan
        self._optimizer = make_optimizer(self._options, plan.steps)
        self._rate = learning_rate(self._options, plan.steps)
        self._kl_kind = kl_objective(plan.cache.encoding)[1]
        self._row_sums: Any = None
        self._since_evaluation = [0, 0.0]  # tokens, seconds
        self._compiled = False  # the session's first step compiles, and is no measure of the rate

    def go(self) -> Trained:
        plan, run = self._plan, self._ready.run
        state, position, start = self._state()
        for note in notes(plan):
            self._say(note)
        if start >= plan.steps:
            self._say(f"{run.folder} is finished: {plan.steps} steps.")
            return self._outcome(0)
        with ExitStack() as stack:
            enter = stack.enter_context
            settings = {**asdict(self._options), "steps": plan.steps}
            trackers = enter(
                open_trackers(
                    self._options.track,
                    run.folder,
                    self._options.project or "stillroom",
                    settings,
                    self._past(start),
                )
            )
            self._metrics = enter(MetricsFile(run.metrics))
            self._evaluations = enter(MetricsFile(run.evaluations))
            if start == 0:
                self._begin(state, position, trackers)
            else:
                self._say(f"Going on after step {start} of {plan.steps}.")
            source = enter(
                TrainingInput(
                    plan.cache,
                    plan.split.training,
                    plan.input_settings(self._ready.functions.rows),
                )
            )
            source.restore(position)
            display = enter(Display(plan.steps, self._options.epochs, start))
            if self._say is to_standard_error:
                # Where the live line is, which it must not break.
                self._say = display.say
            stop = enter(StopRequest(self._say))
            last = start
            for done in self._steps(state, source, start, stop):
                self._log(done, trackers, display)
                if done.state is not None:
                    self._boundary(done, trackers)
                last = done.step
        if last < plan.steps:
            raise KeyboardInterrupt(stop.number)
        return self._outcome(last - start)

    def _past(self, start: int) -> list[tuple[int, dict[str, float]]]:
        """The curves up to a step, for trackers that lost their last ones."""
        run = self._ready.run
        past = [(line["step"], _curves("train", line)) for line in read_metrics(run.metrics)]
        past += [(x["step"], _curves("held_out", x)) for x in read_metrics(run.evaluations)]
        return sorted((x for x in past if x[0] <= start), key=lambda x: x[0])

    def _steps(self, state: State, source: TrainingInput, start: int, stop: StopRequest) -> Any:
        plan, ready = self._plan, self._ready
        step = make_step(
            ready.functions, plan.loss_settings(ready.legal), self._optimizer, plan.devices
        )
        return run_steps(
            state,
            source,
            start,
            plan.steps,
            step,
            lambda batch: place(batch, self._options.accumulation, plan.devices),
            lambda number: alpha(self._options, number, plan.steps),
            plan.checkpoints_after,
            stop,
        )

    def _state(self) -> tuple[State, dict[str, Any], int]:
        """Where to begin: the newest sound checkpoint, or the student as it was built."""
        ready, devices = self._ready, self._plan.devices
        if ready.begins:
            parameters = replicate(ready.parameters, devices)
            optimizer = replicate(self._optimizer.init(parameters), devices)
            return State(parameters, optimizer), {"step": 0}, 0
        restored = self._restore()
        for warning in restored.warnings:
            self._say(f"Warning: {warning}.")
        state = State(restored.state["parameters"], restored.state["optimizer"])
        return state, dict(restored.position), restored.step

    def _restore(self) -> Restored:
        sharding = jax.tree.leaves(replicate(np.zeros(()), self._plan.devices))[0].sharding

        def like(x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        parameters = jax.tree.map(like, self._ready.parameters)
        optimizer = jax.tree.map(like, jax.eval_shape(self._optimizer.init, parameters))
        found = self._ready.checkpoints.restore({"parameters": parameters, "optimizer": optimizer})
        if found is None:
            raise RunError(f"the checkpoints of {self._ready.run.folder} have just gone.")
        return found

    def _begin(self, state: State, position: Mapping[str, Any], trackers: Trackers) -> None:
        """Measures the student before its first step, and saves it as it is."""
        _check_finite(state, 0)
        evaluation = self._evaluate(state, 0, trackers)
        if evaluation is not None:
            self._say(
                f"Held-out perplexity before step 1: student {evaluation.perplexity:,.1f}, teacher "
                f"{evaluation.teacher_perplexity:,.1f}; KL {evaluation.kl:.3f} nats "
                f"({evaluation.kl_kind})."
            )
            if evaluation.beats_teacher:
                self._say(
                    "Warning: the student predicts these labels better than the teacher already; "
                    "it has little to learn from it. Is it the right teacher for this corpus?"
                )
        self._save(0, state, position, evaluation)

    def _boundary(self, done: Done, trackers: Trackers) -> None:
        assert done.state is not None
        _check_finite(done.state, done.step)
        evaluation = None
        if self._plan.evaluates_after(done.step):
            evaluation = self._evaluate(done.state, done.step, trackers)
        self._save(done.step, done.state, done.position, evaluation)

    def _save(
        self,
        step: int,
        state: State,
        position: Mapping[str, Any],
        evaluation: Evaluation | None,
    ) -> None:
        metrics = None if evaluation is None else {"loss": evaluation.loss}
        tree = {"parameters": state.parameters, "optimizer": state.optimizer}
        self._ready.checkpoints.save(step, tree, position, metrics)

    def _evaluate(self, state: State, step: int, trackers: Trackers) -> Evaluation | None:
        plan, functions = self._plan, self._ready.functions
        if not len(plan.split.held_out):
            return None
        if self._row_sums is None:
            self._row_sums = make_row_sums(
                functions, plan.measures(self._ready.legal), plan.devices
            )
        final = alpha(self._options, plan.steps - 1, plan.steps)
        found = mean_over(
            self._row_sums,
            state.parameters,
            plan.held_out(functions.rows, _EVALUATION_ROWS * len(plan.devices)),
            plan.objective,
            final,
            self._kl_kind,
            plan.devices,
        )
        tokens, seconds = self._since_evaluation
        self._since_evaluation = [0, 0.0]
        line = {
            "epoch": plan.epoch_of(step) if step else 0,
            **found.to_json(),
            "tokens_per_second": tokens / seconds if seconds else None,
        }
        self._evaluations.write(step, line)
        trackers.log(step, _curves("held_out", line))
        if step:
            self._say(
                f"Step {step}, held out: cross-entropy {found.cross_entropy:.4f}, perplexity "
                f"{found.perplexity:,.2f}, KL {found.kl:.4f}, top-1 {found.top1:.1%}."
            )
        return found

    def _log(self, done: Done, trackers: Trackers, display: Display) -> None:
        rate = float(self._rate(done.step - 1))  # type: ignore[arg-type]
        if self._compiled:
            self._since_evaluation[0] += done.tokens
            self._since_evaluation[1] += done.seconds
        self._compiled = True
        epoch = self._plan.epoch_of(done.step)
        values: dict[str, Any] = {
            "loss": done.loss,
            "ce": done.ce,
            "kd": done.kd,
            "perplexity": float(np.exp(done.ce)),
            "gradient_norm": done.gradient_norm,
            "learning_rate": rate,
            "alpha": done.alpha,
            "tokens_per_second": done.tokens / max(done.seconds, 1e-9),
            "input_wait": done.waited / max(done.seconds, 1e-9),
            "device_memory": device_memory(self._plan.devices),
        }
        counts = {"epoch": epoch, "labels": done.labels, "tokens": done.tokens}
        self._metrics.write(done.step, {**counts, **values})
        trackers.log(done.step, _curves("train", values))
        distils = self._plan.objective.kind != "labels"
        display.update(
            Moment(
                step=done.step,
                epoch=epoch,
                loss=done.loss,
                cross_entropy=done.ce,
                distillation=done.kd if distils else None,
                learning_rate=rate,
                tokens=done.tokens,
            )
        )

    def _outcome(self, steps: int) -> Trained:
        run = self._ready.run
        return Trained(run.folder, steps, tuple(read_metrics(run.evaluations)))


def _check_finite(state: State, step: int) -> None:
    """A step's loss is that before its update, and so says nothing of what the update gave."""
    for name, x in state.parameters.items():
        if not jnp.isfinite(x).all():
            raise TrainingError(
                f"after step {step} the parameter {name} holds numbers that are not finite. "
                "Nothing of this step was saved; checkpoints before it are sound. Try a lower "
                "--learning-rate or a --clip, with another --out."
            )


def _curves(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The measured numbers of a line of metrics, by the names of their curves."""
    return {f"{group}/{name}": x for name, x in values.items() if isinstance(x, float)}


def device_memory(devices: Any) -> float | None:
    """Most bytes that any device has held; None where the backend does not tell (CPUs)."""
    known = [stats["peak_bytes_in_use"] for d in devices if (stats := d.memory_stats())]
    return float(max(known)) if known else None
