"""Rotary settings of a config.json, in the old spelling and the new one."""

from collections.abc import Mapping
from typing import Any

from decoder.config import RopeScaling
from decoder.config_fields import integer, number
from decoder.errors import DecoderError
from decoder.families import Family

# For each rotary type, the keys that belong to it; any other key is an error.
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}
LOCAL = "rope_local_base_freq"
# Kinds of layers, as transformers names them.
FULL, SLIDING = "full_attention", "sliding_attention"


def rope_of(
    config: Mapping[str, Any], family: Family
) -> tuple[float, RopeScaling | None, float | None]:
    """Base and scaling of the ordinary layers, and the base of those with a window.

    The last is None for families that do not tell the two apart. From the old keys (rope_theta,
    rope_scaling, rope_local_base_freq) or the new one (rope_parameters, transformers 5; one
    object for each kind of layer where a family has two), which must agree where both stand.
    """
    default = family.default("rope_theta")
    if LOCAL not in family.fields:
        return *_rope(config, default, family), None
    new = config.get("rope_parameters", {})
    if not isinstance(new, Mapping) or not set(new) <= {FULL, SLIDING}:
        raise DecoderError(
            f"config.json: rope_parameters is {new!r}; expected an object with {FULL!r} and "
            f"{SLIDING!r}"
        )
    full = {key: value for key, value in config.items() if key != "rope_parameters"}
    if new.get(FULL) is not None:
        full["rope_parameters"] = new[FULL]
    sliding: dict[str, Any] = {}
    if new.get(SLIDING) is not None:
        sliding["rope_parameters"] = new[SLIDING]
    if LOCAL in config:
        sliding["rope_theta"] = config[LOCAL]
    local, scaling = _rope(sliding, family.default(LOCAL), family)
    if scaling is not None:
        raise DecoderError(
            f"config.json: rope_parameters.{SLIDING} has the type {scaling.kind!r}; supported: "
            "default"
        )
    return *_rope(full, default, family), local


def _rope(
    config: Mapping[str, Any], default: float, family: Family
) -> tuple[float, RopeScaling | None]:
    old = _rope_group(config, "rope_scaling", family)
    new = _rope_group(config, "rope_parameters", family)
    if old is not None and new is not None and old[1] != new[1]:
        raise DecoderError(
            f"config.json: rope_scaling {config['rope_scaling']!r} and rope_parameters "
            f"{config['rope_parameters']!r} disagree; keep the right one"
        )
    thetas = {group[0] for group in (old, new) if group is not None and group[0] is not None}
    if "rope_theta" in config:
        thetas.add(number(config, "rope_theta", 0.0))
    if len(thetas) > 1:
        raise DecoderError(
            f"config.json: rope_theta is given as {sorted(thetas)}; keep the right one"
        )
    group = new if new is not None else old
    return (thetas.pop() if thetas else default), (group[1] if group is not None else None)


def _rope_group(
    config: Mapping[str, Any], field: str, family: Family
) -> tuple[float | None, RopeScaling | None] | None:
    if field not in config:
        return None
    if not isinstance(config[field], Mapping):
        raise DecoderError(f"config.json: {field} is {config[field]!r}; expected an object")
    group = {key: value for key, value in config[field].items() if value is not None}
    names = {group.pop(key) for key in ("rope_type", "type") if key in group}
    if len(names) > 1:
        raise DecoderError(f"config.json: {field} names two types: {sorted(map(str, names))}")
    kind = names.pop() if names else "default"
    if kind not in family.ropes:
        raise DecoderError(
            f"config.json: {field} has the type {kind!r}; supported: {', '.join(family.ropes)}"
        )
    theta = number(group, "rope_theta", 0.0) if "rope_theta" in group else None
    group.pop("rope_theta", None)
    if group.pop("partial_rotary_factor", 1) != 1:
        raise DecoderError(
            f"config.json: {field}.partial_rotary_factor is "
            f"{config[field]['partial_rotary_factor']!r}; supported is 1"
        )
    unknown = sorted(set(group) - _ROPE_KEYS[kind])
    missing = sorted(_ROPE_KEYS[kind] - set(group))
    if unknown or missing:
        raise DecoderError(
            f"config.json: {field} of type {kind!r} needs the keys {sorted(_ROPE_KEYS[kind])}; "
            f"missing: {missing}, not understood: {unknown}"
        )
    return theta, _scaling(kind, group)


def _scaling(kind: str, group: Mapping[str, Any]) -> RopeScaling | None:
    if kind == "default":
        return None
    factor = number(group, "factor", 1.0)
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    return RopeScaling(
        "llama3",
        factor=factor,
        low_frequency_factor=number(group, "low_freq_factor", 1.0),
        high_frequency_factor=number(group, "high_freq_factor", 1.0),
        original_positions=integer(group, "original_max_position_embeddings"),
    )


def rope_scaling_keys(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """What stands under rope_scaling. Raises `DecoderError` for what cannot stand there."""
    if scaling is None:
        return None
    if scaling.kind == "divisors":
        raise DecoderError(
            "a config.json cannot say the rotary scaling 'divisors' (one divisor per frequency, "
            "as GGUF files have it). Start from the original model's folder instead of its GGUF "
            "file: its config.json has the rule that the divisors come from"
        )
    group = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        group |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return group
