"""Decoders of random weights."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from decoder.config import DecoderConfig
from decoder.model import Decoder


def random_model(config: DecoderConfig, seed: int = 0) -> Decoder:
    """float32 weights of deviation 0.25, norms around what leaves their input alone."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=None)))
    random = np.random.default_rng(seed)
    flat = []
    for path, one in nnx.to_flat_state(state):
        norm = str(path[-2]).endswith("norm") and config.norm != "offset"
        values = random.normal(float(norm), 0.25, one.shape)
        flat.append((path, one.replace(jnp.asarray(values, one.dtype))))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))
