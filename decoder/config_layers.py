"""What differs from layer to layer, from a config.json and into it: windows, positions, experts.

The functions take a config.json's entries with the family's defaults filled in and without nulls.
"""

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from decoder.config_fields import flag, integer
from decoder.config_rope import FULL, LOCAL, SLIDING
from decoder.errors import DecoderError
from decoder.families import Family


def windows_of(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """How many positions each layer sees; 0: all before."""
    given = _listed(config, "layer_types", layers, (FULL, SLIDING))
    window = _window(config, family)
    if family.windows == "listed":
        types = given if given is not None else _usual_types(config, window, layers)
    else:
        types = [SLIDING if window else FULL] * layers
        if given is not None and given != types:
            raise DecoderError(
                f"config.json: layer_types is {given}, which transformers does not read for "
                f"model_type {family.name!r}; its layers are all {types[0]!r}"
            )
    if SLIDING in types and not window:
        raise DecoderError(
            f"config.json: layer_types has {SLIDING!r}, but no window is in use: sliding_window "
            f"is {config.get('sliding_window')!r}, use_sliding_window "
            f"{config.get('use_sliding_window')!r}"
        )
    return tuple(window if kind == SLIDING else 0 for kind in types)


def _window(config: Mapping[str, Any], family: Family) -> int:
    if "sliding_window" not in family.fields or "sliding_window" not in config:
        return 0
    if "use_sliding_window" in family.fields and not flag(config, "use_sliding_window", False):
        return 0
    window = integer(config, "sliding_window")
    if window < 1:
        raise DecoderError(f"config.json: sliding_window is {window}; it must be at least 1")
    if family.windows == "all" and "max_window_layers" in config:
        raise DecoderError(
            f"config.json: max_window_layers is {config['max_window_layers']!r} with a window in "
            f"use, but transformers does not read it for model_type {family.name!r}: every layer "
            "has the window. Remove the key if that is meant"
        )
    return window


def _usual_types(config: Mapping[str, Any], window: int, layers: int) -> list[str]:
    """transformers' rule of each family for a config.json without layer_types."""
    if "sliding_window_pattern" in config:  # Gemma 3: every n-th layer is full
        pattern = integer(config, "sliding_window_pattern")
        if pattern < 1:
            raise DecoderError(f"config.json: sliding_window_pattern is {pattern}; at least 1")
        other = config.get("_sliding_window_pattern", pattern)
        if other != pattern:
            raise DecoderError(
                f"config.json: _sliding_window_pattern is {other!r} and sliding_window_pattern "
                f"{pattern}; keep the right one, as sliding_window_pattern"
            )
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    if "no_rope_layer_interval" in config:  # SmolLM 3: layers without positions
        rotary = rotary_layers(config, layers)
        return [SLIDING if window and not rotary[layer] else FULL for layer in range(layers)]
    if "max_window_layers" in config:  # Qwen: the first layers are full
        first = integer(config, "max_window_layers")
        return [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]  # Gemma 2


def ropes_of(
    config: Mapping[str, Any], family: Family, windows: tuple[int, ...]
) -> tuple[str, ...]:
    """Which rotary positions each layer has, as `DecoderConfig.ropes`."""
    if LOCAL in family.fields:
        return tuple("local" if window else "global" for window in windows)
    if "no_rope_layers" in family.fields:
        rotary = rotary_layers(config, len(windows))
        return tuple("global" if one else "none" for one in rotary)
    return ()


def rotary_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """SmolLM 3's no_rope_layers: 1 where a layer HAS rotary positions, 0 where not."""
    given = _listed(config, "no_rope_layers", layers, (0, 1))
    if given is not None:
        return given
    interval = integer(config, "no_rope_layer_interval")
    if interval < 1:
        raise DecoderError(f"config.json: no_rope_layer_interval is {interval}; at least 1")
    return [int((layer + 1) % interval != 0) for layer in range(layers)]


def experts_of(config: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """The fields of `DecoderConfig` about experts; empty for a family that has none."""
    if "num_experts_per_tok" not in family.fields:
        return {}
    counts = {integer(config, key) for key in ("num_experts", "num_local_experts") if key in config}
    if len(counts) > 1:
        raise DecoderError(
            f"config.json: num_experts and num_local_experts disagree: {sorted(counts)}"
        )
    experts = counts.pop()
    found: dict[str, Any] = {
        "experts": experts,
        "experts_used": integer(config, "num_experts_per_tok"),
    }
    if "moe_intermediate_size" not in family.fields:
        width = integer(config, "intermediate_size")
        return {**found, "expert_width": width, "sparse": (True,) * layers}
    step = integer(config, "decoder_sparse_step")
    if step < 1:
        raise DecoderError(f"config.json: decoder_sparse_step is {step}; it must be at least 1")
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise DecoderError(f"config.json: mlp_only_layers is {dense!r}; expected a list of layers")
    sparse = (
        layer not in dense and experts > 0 and (layer + 1) % step == 0 for layer in range(layers)
    )
    return {
        **found,
        "expert_width": integer(config, "moe_intermediate_size"),
        "shares_add_up": flag(config, "norm_topk_prob", False),
        "sparse": tuple(sparse),
    }


def _listed(
    config: Mapping[str, Any], key: str, layers: int, allowed: tuple[Any, ...]
) -> list[Any] | None:
    given = config.get(key)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != layers:
        raise DecoderError(
            f"config.json: {key} is {given!r}; expected one entry for each of {layers} layers"
        )
    unknown = [one for one in given if one not in allowed]
    if unknown:
        raise DecoderError(
            f"config.json: {key} has {unknown[0]!r}; supported: {', '.join(map(str, allowed))}"
        )
    return [int(one) if isinstance(one, bool) else one for one in given]


def layer_keys(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """The keys from which the functions above read the same again, if the family can say it."""
    window = max(config.windows, default=0) or None
    keys: dict[str, Any] = {}
    if "sliding_window" in family.fields:
        keys["sliding_window"] = window
    if "use_sliding_window" in family.fields:
        keys["use_sliding_window"] = window is not None
    elif family.windows == "listed" and window is None:
        # Gemma's code in transformers wants one even when no layer uses it.
        keys["sliding_window"] = family.default("sliding_window")
    if family.windows == "listed":
        types = [SLIDING if config.window(layer) else FULL for layer in range(config.layers)]
        keys["layer_types"] = types
    if "no_rope_layers" in family.fields:
        keys["no_rope_layers"] = [int(config.rope(n) != "none") for n in range(config.layers)]
    if "num_experts_per_tok" in family.fields:
        keys["num_experts_per_tok"] = config.experts_used
        if "moe_intermediate_size" not in family.fields:
            return {**keys, "num_local_experts": config.experts}
        keys |= {
            "num_experts": config.experts,
            "moe_intermediate_size": config.expert_width,
            "norm_topk_prob": config.shares_add_up,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n in range(config.layers) if not config.has_experts(n)],
        }
    return keys
