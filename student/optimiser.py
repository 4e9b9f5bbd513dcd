"""AdamW with warm-up and cosine, and α over the run: functions of the step alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from student.functions import Parameters
from student.options import TrainOptions


def learning_rate(options: TrainOptions, steps: int) -> optax.Schedule:
    """The learning rate of each step 0 … steps - 1: linear warm-up, then half a cosine.

    The first step's is not 0, and the last one's is `final_learning_rate` of the highest, unless
    it is the first after the warm-up and so has the highest.
    """
    warm = min(math.ceil(options.warmup * steps), steps - 1)
    highest = options.learning_rate
    cosine = optax.cosine_decay_schedule(
        highest, max(steps - 1 - warm, 1), options.final_learning_rate
    )
    if not warm:
        return cosine
    rise = optax.linear_schedule(highest / (warm + 1), highest, warm)
    return optax.join_schedules([rise, cosine], [warm])


def alpha(options: TrainOptions, step: int, steps: int) -> float:
    """Weight of the labels' cross-entropy at a step 0 … steps - 1; linear to `alpha_end`."""
    if options.alpha_end is None or steps < 2:
        return options.alpha
    return options.alpha + (options.alpha_end - options.alpha) * step / (steps - 1)


def make_optimizer(options: TrainOptions, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (Loshchilov, Hutter, 2019), decaying matrices only."""

    def matrices(parameters: Parameters) -> dict[str, bool]:
        return jax.tree.map(lambda x: x.ndim >= 2, parameters)

    adamw = optax.adamw(
        learning_rate(options, steps), weight_decay=options.weight_decay, mask=matrices
    )
    clip = [optax.clip_by_global_norm(options.clip)] if options.clip else []
    chain = optax.chain(*clip, adamw)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        # Optax mixes integers and floats, which JAX refuses when it is set to be strict.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(updates, state, params, **more)

    return optax.GradientTransformationExtraArgs(chain.init, update)
