"""The sizes and choices that say which decoder a model is, whatever its family is called."""

import math
from dataclasses import dataclass, replace
from typing import Any

from decoder.errors import DecoderError

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
NORMS = ("plain", "wide", "offset")
NORM_PLACES = ("before", "after", "both")
HEAD_NORMS = ("none", "head", "whole")
ROPES = ("global", "local", "none")


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
    """Sizes and choices of one decoder; hashable, so that it can be static under jit.

    What differs from layer to layer is a tuple with one entry per layer; `()` says that every
    layer is of the ordinary kind, and a tuple that says the same becomes `()`.

    Attributes:
      vocabulary: rows of the embedding and of the head.
      mlp_width: of the layers without experts.
      activation: "silu", "gelu_tanh" (the approximation by tanh) or "gelu" (by erf).
      tied: the head is the embedding.
      output_bias: of the attention's output projection.
      family: transformers' `model_type`; names the tensors and what `save_folder` writes, and
        changes no number.
      norm: "plain" rounds to the model's dtype before the weight is applied, "wide" after it
        (OLMo 2), "offset" applies 1 + weight in float32 (Gemma).
      norm_places: norms "before" attention and MLP, "after" them (OLMo 2), or "both".
      head_norm: of queries and keys: "none", of each "head", or of the "whole" projection.
      scaled_embedding: embeddings times sqrt(width), rounded to the model's dtype (Gemma).
      query_scalar: scores are divided by its root; None: by that of head_dim.
      attention_cap, output_cap: scores, and logits, become `cap * tanh(x / cap)`.
      windows: how many positions a layer sees, its own included; 0: all before.
      ropes: per layer "global" (`rope_theta`, `rope_scaling`), "local" (`rope_local_theta`,
        not scaled) or "none".
      experts: in the MLP of each layer of which `sparse` is true; 0: no layer has any.
      experts_used: how many of them each token goes through.
      expert_width: of each expert.
      shares_add_up: the shares of a token's experts are divided by their sum.
    """

    vocabulary: int
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
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    family: str = "llama"
    norm: str = "plain"
    norm_places: str = "before"
    head_norm: str = "none"
    scaled_embedding: bool = False
    query_scalar: float | None = None
    attention_cap: float | None = None
    output_cap: float | None = None
    windows: tuple[int, ...] = ()
    ropes: tuple[str, ...] = ()
    rope_local_theta: float | None = None
    experts: int = 0
    experts_used: int = 0
    expert_width: int = 0
    shares_add_up: bool = False
    sparse: tuple[bool, ...] = ()

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
        if not (math.isfinite(self.norm_epsilon) and self.norm_epsilon >= 0):
            raise DecoderError(f"norm_epsilon is {self.norm_epsilon}; it must be at least 0")
        self._require_one_of("activation", ACTIVATIONS)
        self._require_one_of("norm", NORMS)
        self._require_one_of("norm_places", NORM_PLACES)
        self._require_one_of("head_norm", HEAD_NORMS)
        for name in (
            "rope_theta",
            "rope_local_theta",
            "query_scalar",
            "attention_cap",
            "output_cap",
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise DecoderError(f"{name} is {value}; it must be above 0")
        scaling = self.rope_scaling
        if scaling and scaling.kind == "divisors" and len(scaling.divisors) != self.head_dim // 2:
            raise DecoderError(
                f"{len(scaling.divisors)} rotary divisors for head_dim {self.head_dim}: "
                f"expected {self.head_dim // 2}"
            )
        self._check_layers()
        self._check_experts()

    def window(self, layer: int) -> int:
        """How many positions a layer sees, its own included; 0: all before."""
        return self.windows[layer] if self.windows else 0

    def rope(self, layer: int) -> str:
        """ "global", "local" or "none"."""
        return self.ropes[layer] if self.ropes else "global"

    def has_experts(self, layer: int) -> bool:
        return self.sparse[layer] if self.sparse else False

    def without_layers(self, first: int, last: int) -> "DecoderConfig":
        """The same without the layers `first` to `last`, inclusive; the others keep their kind."""
        kept = {
            name: getattr(self, name)[:first] + getattr(self, name)[last + 1 :]
            for name in _PER_LAYER
        }
        return replace(self, layers=self.layers - (last - first + 1), **kept)

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value < 1:
            raise DecoderError(f"{name} is {value}; it must be at least 1")

    def _require_one_of(self, name: str, supported: tuple[str, ...]) -> None:
        if getattr(self, name) not in supported:
            raise DecoderError(
                f"{name} {getattr(self, name)!r} is not supported; supported: "
                f"{', '.join(supported)}"
            )

    def _check_layers(self) -> None:
        for name, ordinary in _PER_LAYER.items():
            kinds = getattr(self, name)
            if kinds and len(kinds) != self.layers:
                raise DecoderError(f"{name} has {len(kinds)} entries for {self.layers} layers")
            if all(kind == ordinary for kind in kinds):
                object.__setattr__(self, name, ())
        if any(window < 0 for window in self.windows):
            raise DecoderError(f"windows is {self.windows}; none may be below 0")
        unknown = sorted(set(self.ropes) - set(ROPES))
        if unknown:
            raise DecoderError(f"ropes has {unknown}; supported: {', '.join(ROPES)}")
        if "local" in self.ropes and self.rope_local_theta is None:
            raise DecoderError("some layers have local rotary positions, but no rope_local_theta")

    def _check_experts(self) -> None:
        if not self.sparse:
            return
        self._require_positive("expert_width")
        if not 1 <= self.experts_used <= self.experts:
            raise DecoderError(
                f"each token goes through {self.experts_used} of {self.experts} experts; expected "
                "1 to all of them"
            )


# What may differ from layer to layer, and its ordinary kind.
_PER_LAYER: dict[str, Any] = {"windows": 0, "ropes": "global", "sparse": False}
