"""Every option of training, evaluating and exporting, with its default and the default's reason.

Where a default comes from: "recipe" marks what the published recipes for distilling a
2-billion-parameter student recommend (batch 512 in 4 micro-batches, AdamW at 1e-5 with weight
decay 0.1, 3 epochs, α = 0.5, temperature 2 to 5). We keep all of it but the temperature: with a
cache of k entries the entries hold 83-92 % of the teacher's probability at temperature 1, 17-31 %
at 2 and 2 % at 4 (SmolLM2, k = 64), and students trained at 2 were worse. So the default is the
temperature of the capture, 1 unless it was made otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from student.errors import StudentError

Objective = Literal["auto", "sampled", "bucket", "renormalise"]
Divergence = Literal["forward", "reverse", "js", "tv"]
Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True)
class TrainOptions:
    """Trains a student from a cache. Trains any number of them from one cache.

    Run the same command again after any interruption: it goes on from the newest checkpoint,
    and a finished run is left as it is. A command that asks for anything else than what the run
    folder holds is refused.

    Example: stillroom train cache --student models/student --out runs/first --batch 64

    Defaults marked (recipe) are those of published recipes for 2-billion-parameter students.
    """

    cache: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CACHE")]
    """The cache: a local path, gs://…, s3://… or http://…."""
    student: Annotated[str, tyro.conf.arg(metavar="NAME|PATH|preset:SIZE|CONFIG.json")]
    """Where the student starts: a checkpoint (hub name, folder, .gguf file, or
    package.module:function), or from scratch with a preset (preset:nano, preset:mini,
    preset:small) or the sizes in a config.json."""
    out: Annotated[str, tyro.conf.arg(metavar="RUN")]
    """Folder of the run: checkpoints, metrics, settings. A local path."""

    # The student.
    student_revision: Annotated[str | None, tyro.conf.arg(metavar="REVISION")] = None
    """Revision of a hub student; resolved to a commit. Unset: its newest."""
    drop_layers: Annotated[str | None, tyro.conf.arg(metavar="FIRST-LAST|COUNT")] = None
    """Leave out a block of layers, counted from 0: 9-18; or so many of them: the block whose
    loss hurts least is found by held-out cross-entropy. Unset: keep all."""
    trim_vocabulary: bool = False
    """Cut rows of the student's embedding and head beyond the tokenizer's ids."""

    # The data.
    local_copy: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Keep what is read of a remote cache in a local folder, whole files of shards, and read it
    there from then on. Several caches and runs may share the folder. Decides no result. Unset:
    keep nothing."""
    held_out: float = 0.05
    """Rows that are evaluated and never trained on: a share below 1, or a number of rows.
    Documents that share a row stay together."""
    epochs: int = 3
    """Passes over the training rows. (recipe)"""
    length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Train on only the first so many positions of each row. Unset: on all."""
    shuffle_block: int = 1
    """Rows that stay together when the order is drawn. On object storage runs of 16 to 64 rows
    take far fewer requests than single ones; a batch should have many blocks."""
    seed: int = 0
    """Of the split, the order of the rows, and the weights of a student from scratch."""

    # The objective.
    objective: Objective = "auto"
    """What the student learns of the teacher. sampled: unbiased cross-entropy against the cached
    weights. bucket: the exact entries and the rest as one more class. renormalise: the exact
    entries alone, as if they were all. auto: sampled if the cache has a sampled tail, else
    bucket."""
    divergence: Divergence | None = None
    """Of bucket and renormalise. forward: KL(teacher, student). reverse: KL(student, teacher).
    js: Jensen-Shannon with --beta. tv: total variation. Unset: forward, all that sampled has."""
    beta: float | None = None
    """Weight of the teacher in the mixture of --divergence js; above 0, below 1. Unset: 0.5."""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """A captured temperature. Unset: the capture's first."""
    alpha: float = 0.5
    """Weight of the cross-entropy on the labels; 1 - alpha is the teacher's. (recipe)"""
    alpha_end: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Move alpha linearly to this value over the run. Unset: it stays."""

    # The optimiser: AdamW with warm-up and cosine.
    batch: int = 512
    """Rows in a step, over all devices. (recipe)"""
    accumulation: int = 4
    """Micro-batches that a step is cut into, to save memory. (recipe)"""
    learning_rate: float = 1e-5
    """At its highest. (recipe; small students and students from scratch want 3e-4 and more)"""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises."""
    final_learning_rate: float = 0.1
    """Where the cosine ends, as a share of the highest."""
    weight_decay: float = 0.1
    """Of matrices; vectors (norms, biases) are not decayed. (recipe)"""
    clip: float = 1.0
    """Longest gradient (global norm); longer ones are shortened to it. 0 switches it off."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of activations and matrix products; parameters and optimiser are float32. auto: bfloat16 on
    GPUs and TPUs, float32 on CPUs, where bfloat16 is slower."""
    remat: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    chunk: int = 128
    """Positions whose logits exist at once on a device."""

    # Checkpoints and evaluation.
    checkpoint_every: int = 500
    """Steps between checkpoints. There is one after each evaluation, too."""
    evaluate_every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps between evaluations on the held-out rows. Unset: after each epoch."""
    keep: int = 3
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Keep the checkpoint of least held-out loss, too."""

    # Tracking.
    track: tuple[Tracker, ...] = ()
    """Write curves for TensorBoard or Weights & Biases, too. Needs the extra `tracking`."""
    project: str | None = None
    """Project of Weights & Biases. Unset: stillroom."""

    def __post_init__(self) -> None:
        demand = _Demand(self)
        for name in ("cache", "student", "out"):
            demand(bool(getattr(self, name).strip()), name, "given")
        for name in ("epochs", "batch", "accumulation", "chunk", "checkpoint_every", "keep"):
            demand(getattr(self, name) >= 1, name, "at least 1")
        demand(self.shuffle_block >= 1, "shuffle_block", "at least 1")
        for name in ("length", "evaluate_every"):
            value = getattr(self, name)
            demand(value is None or value >= 1, name, "at least 1")
        demand(0 <= self.held_out < math.inf, "held_out", "a share below 1, or a number of rows")
        whole = self.held_out < 1 or self.held_out == int(self.held_out)
        demand(whole, "held_out", "a share below 1, or a whole number of rows")
        demand(0 <= self.seed < 2**32, "seed", "between 0 and 2^32 - 1")
        demand(0 < self.mixture < 1, "beta", "above 0 and below 1")
        demand(0 <= self.alpha <= 1, "alpha", "between 0 and 1")
        for name in ("learning_rate", "temperature"):
            value = getattr(self, name)
            demand(value is None or 0 < value < math.inf, name, "above 0")
        end = self.alpha_end
        demand(end is None or 0 <= end <= 1, "alpha_end", "between 0 and 1")
        for name in ("warmup", "final_learning_rate"):
            demand(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        for name in ("weight_decay", "clip"):
            demand(0 <= getattr(self, name) < math.inf, name, "at least 0")
        if self.batch % self.accumulation:
            raise StudentError(
                f"--batch {self.batch} cannot be cut into --accumulation {self.accumulation} "
                "equal micro-batches. Change one so that it divides."
            )
        self._check_effects()

    def _check_effects(self) -> None:
        """Refuses options that would do nothing beside the others."""
        if self.beta is not None and self.divergence != "js":
            raise StudentError(
                f"--beta {self.beta:g} is of --divergence js and does nothing with --divergence "
                f"{self.divergence or 'forward'}. Leave it out, or give --divergence js."
            )
        if self.labels_alone:
            for name in ("objective", "divergence", "temperature"):
                value = getattr(self, name)
                if value not in (None, "auto"):
                    raise StudentError(
                        f"--{name} {value} does nothing with --alpha 1, which uses the labels "
                        "alone. Leave it out, or lower --alpha, or give an --alpha-end below 1."
                    )
        if self.evaluate_every is not None and not self.held_out:
            raise StudentError(
                f"--evaluate-every {self.evaluate_every} does nothing with --held-out 0: there are "
                "no rows to evaluate on. Leave it out, or hold some rows out."
            )
        if self.project is not None and "wandb" not in self.track:
            raise StudentError(
                f"--project {self.project} is of Weights & Biases. Leave it out, or give --track "
                "wandb."
            )

    @property
    def labels_alone(self) -> bool:
        """Whether nothing of the teacher is learnt at any step."""
        return self.alpha == 1 and self.alpha_end in (None, 1)

    @property
    def mixture(self) -> float:
        """The weight of the teacher in the mixture of --divergence js."""
        return 0.5 if self.beta is None else self.beta


@dataclass(frozen=True)
class EvaluateOptions:
    """Measures a trained student on its held-out rows.

    Example: stillroom evaluate runs/first
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="best|last|STEP")] = "last"
    """Which checkpoint: last, best (least held-out loss), or the number of a step."""
    cache: Annotated[str | None, tyro.conf.arg(metavar="CACHE")] = None
    """Where the run's cache is now. Unset: where it was."""
    local_copy: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Keep what is read of a remote cache in a local folder, and read it there from then on.
    Unset: keep nothing."""
    teacher: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH|MODULE:FUNCTION")] = None
    """Load the teacher, too, and report the KL over the whole vocabulary. Unset: over what the
    cache holds alone."""
    teacher_revision: str | None = None
    """Revision of a hub teacher. Unset: its newest."""
    batch: int = 8
    """Rows that are evaluated at once on each device. Decides no result."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        demand = _Demand(self)
        demand(bool(self.run.strip()), "run", "given")
        demand(self.batch >= 1, "batch", "at least 1")
        _check_checkpoint(demand, self.checkpoint)
        if self.teacher_revision is not None and self.teacher is None:
            raise StudentError(
                f"--teacher-revision {self.teacher_revision} is of --teacher. Leave it out, or "
                "give --teacher."
            )


@dataclass(frozen=True)
class ExportOptions:
    """Writes a trained student as a Hugging Face folder: config, weights, tokenizer.

    Example: stillroom export runs/first models/student
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """The folder to make. An existing one is not overwritten."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="best|last|STEP")] = "last"
    """Which checkpoint: last, best (least held-out loss), or the number of a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""

    def __post_init__(self) -> None:
        demand = _Demand(self)
        for name in ("run", "out"):
            demand(bool(getattr(self, name).strip()), name, "given")
        _check_checkpoint(demand, self.checkpoint)


class _Demand:
    """Raises an error that names the option if something does not hold."""

    def __init__(self, options: Any):
        self._options = options

    def __call__(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            option = name.replace("_", "-")
            found = getattr(self._options, name)
            raise StudentError(f"--{option} should be {expected}, found {found!r}.")


def _check_checkpoint(demand: _Demand, checkpoint: str) -> None:
    named = checkpoint in ("best", "last") or checkpoint.isdecimal()
    demand(named, "checkpoint", "best, last or the number of a step")
