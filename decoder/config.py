"""The sizes and choices that say which decoder of the Llama family a model is."""

import math
from dataclasses import dataclass

from decoder.errors import DecoderError

ACTIVATIONS = ("silu",)


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies differ from `theta ** (-2 i / head_dim)`.

    kind "linear": every frequency divided by `factor`.
    kind "llama3": wavelengths longer than `original_positions / low_frequency_factor`
        divided by `factor`, those shorter than `original_positions /
        high_frequency_factor` kept, those between blended.
    kind "divisors": frequency i divided by `divisors[i]` (what GGUF files store).
    """

    kind: str
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_positions: int = 0
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "divisors"):
            raise DecoderError(
                f"rotary scaling {self.kind!r} is not supported; "
                "supported are 'linear', 'llama3' and 'divisors'"
            )
        for value in (self.factor, *self.divisors):
            if not (math.isfinite(value) and value > 0):
                raise DecoderError(
                    f"rotary scaling {self.kind!r} divides by {value}; it must be above 0"
                )
        if self.kind == "llama3":
            low, high = self.low_frequency_factor, self.high_frequency_factor
            if self.original_positions < 1 or not 0 < low < high:
                raise DecoderError(
                    "rotary scaling 'llama3' needs original_max_position_embeddings >= 1 and "
                    f"0 < low_freq_factor < high_freq_factor, found {self.original_positions}, "
                    f"{low} and {high}"
                )


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and choices of one decoder; hashable, so that it can be static under jit."""

    vocabulary: int  # rows of the embedding and of the head
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    activation: str = "silu"
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim"):
            self._require_positive(name)
        for name in ("mlp_width", "max_positions"):
            self._require_positive(name)
        if self.heads % self.kv_heads:
            raise DecoderError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads: "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise DecoderError(f"head_dim is {self.head_dim}; rotary positions need an even number")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise DecoderError(f"rope_theta is {self.rope_theta}; it must be above 0")
        if not (math.isfinite(self.norm_epsilon) and self.norm_epsilon >= 0):
            raise DecoderError(f"norm_epsilon is {self.norm_epsilon}; it must be at least 0")
        if self.activation not in ACTIVATIONS:
            raise DecoderError(
                f"activation {self.activation!r} is not supported; supported: "
                f"{', '.join(ACTIVATIONS)}"
            )
        scaling = self.rope_scaling
        if scaling and scaling.kind == "divisors" and len(scaling.divisors) != self.head_dim // 2:
            raise DecoderError(
                f"{len(scaling.divisors)} rotary divisors for head_dim {self.head_dim}: "
                f"expected {self.head_dim // 2}"
            )

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value < 1:
            raise DecoderError(f"{name} is {value}; it must be at least 1")
