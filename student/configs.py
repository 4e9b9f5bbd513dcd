"""Sizes of students from scratch, and configurations as JSON that a run keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from decoder import DecoderConfig, DecoderError, RopeScaling, from_hugging_face
from student.errors import RunError, StudentError

PRESET = "preset:"

# Of the vocabulary and the cache's rows, `scratch_config` sets its own.
_COMMON: dict[str, Any] = {
    "vocabulary": 1,
    "max_positions": 2048,
    "norm_epsilon": 1e-5,
    "tied": True,
}

# Parameters without the embedding: 1.0, 9.9 and 60.2 million.
PRESETS: dict[str, DecoderConfig] = {
    "nano": DecoderConfig(
        width=128, layers=6, heads=4, kv_heads=2, head_dim=32, mlp_width=320, **_COMMON
    ),
    "mini": DecoderConfig(
        width=384, layers=6, heads=6, kv_heads=2, head_dim=64, mlp_width=1088, **_COMMON
    ),
    "small": DecoderConfig(
        width=640, layers=14, heads=10, kv_heads=2, head_dim=64, mlp_width=1728, **_COMMON
    ),
}


def is_scratch(source: str) -> bool:
    """Whether a student's name is a preset or a config.json, not a checkpoint."""
    json_file = source.endswith(".json") and not Path(source).expanduser().is_dir()
    return source.startswith(PRESET) or json_file


def scratch_config(source: str, vocabulary: int, length: int) -> DecoderConfig:
    """The sizes that a preset or a config.json asks for, for a cache.

    Args:
      source: "preset:NAME", or the path of a config.json in Hugging Face's words. Its
        vocab_size does not count and may be left out.
      vocabulary: the cache's.
      length: positions of a row; `max_positions` is at least that.

    Raises:
      StudentError: no such preset or file, or no sizes in it.
    """
    if source.startswith(PRESET):
        name = source.removeprefix(PRESET)
        if name not in PRESETS:
            raise StudentError(
                f"there is no preset {name!r}; there are "
                f"{', '.join(PRESET + each for each in PRESETS)}. For other sizes give the path "
                "of a config.json."
            )
        config = replace(PRESETS[name], vocabulary=vocabulary)
    else:
        parsed = _read(Path(source).expanduser())
        try:
            sized = from_hugging_face({**parsed, "vocab_size": vocabulary})
        except DecoderError as error:
            raise StudentError(f"--student {source}: {error}") from error
        # A config.json of several parts has one of its own further in.
        config = replace(sized, vocabulary=vocabulary)
    return replace(config, max_positions=max(config.max_positions, length))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise StudentError(
            f"--student {path} cannot be read ({error}). Give a config.json, a folder with a "
            "checkpoint, a hub name or a preset."
        ) from error
    except ValueError as error:
        raise StudentError(f"--student {path} is not valid JSON ({error}).") from error
    if not isinstance(parsed, dict):
        raise StudentError(f"--student {path} holds no JSON object; expected a config.json.")
    return parsed


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """A configuration as what JSON gives back; `config_from_json` is its inverse."""
    return json.loads(json.dumps(asdict(config)))


def config_from_json(value: Any) -> DecoderConfig:
    """Reads `config_to_json`'s object, strictly: every field, no other, each of its type.

    Raises:
      RunError: it is no such object, or says what no decoder is.
    """
    try:
        return _build(DecoderConfig, value, "config")
    except DecoderError as error:
        raise RunError(f"the run's record of its student is damaged: {error}.") from error


def _build(kind: type, value: Any, what: str) -> Any:
    if not isinstance(value, Mapping):
        raise RunError(f"the run's record of its student is damaged: {what} is {value!r}.")
    known = {field.name: field.type for field in fields(kind)}
    if set(known) != set(value):
        missing, unknown = sorted(set(known) - set(value)), sorted(set(value) - set(known))
        raise RunError(
            f"the run's record of its student is damaged: {what} lacks {missing} and has the "
            f"unknown {unknown}."
        )
    return kind(**{name: _checked(value[name], _TYPES[known[name]], name) for name in known})


# By the type as the dataclasses of `decoder.config` say it.
_TYPES: dict[Any, Any] = {
    int: int,
    float: float,
    str: str,
    bool: bool,
    RopeScaling | None: RopeScaling,
    float | None: float | None,
    tuple[float, ...]: (float, "numbers"),
    tuple[int, ...]: (int, "whole numbers"),
    tuple[str, ...]: (str, "texts"),
    tuple[bool, ...]: (bool, "true and false"),
}


def _checked(value: Any, expected: Any, name: str) -> Any:
    if expected is RopeScaling:
        return None if value is None else _build(RopeScaling, value, name)
    if expected == float | None:
        if value is None:
            return None
        expected = float
    if isinstance(expected, tuple):
        kind, what = expected
        if isinstance(value, list) and all(type(one) is kind for one in value):
            return tuple(value)
        what = f"a list of {what}"
    else:
        if expected is float and type(value) is int:
            return float(value)
        if type(value) is expected:
            return value
        what = expected.__name__
    raise RunError(
        f"the run's record of its student is damaged: {name} is {value!r}, expected {what}."
    )
