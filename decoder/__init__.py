"""Models of the Llama family in Flax NNX, their strict loading and saving, their tokenizers.

    from decoder import load_model, load_tokenizer

    teacher = load_model("path/to/folder")          # or a hub name, a .gguf file,
    tokenizer = load_tokenizer("path/to/folder")    # or package.module:function
    hidden = teacher.model(tokens, segments, positions)     # one row
    logits = teacher.model.unembed(hidden)

Names are imported when first used, so that a tokenizer alone does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoder.chat import (
        EndOfTurn,
        encode_chat,
        encode_turns,
        end_of_turn,
        render_chat,
        special_text,
    )
    from decoder.config import DecoderConfig, RopeScaling
    from decoder.config_json import from_hugging_face, special_ids, to_hugging_face
    from decoder.errors import DecoderError
    from decoder.loading import (
        LoadedModel,
        ModelDescription,
        describe_model,
        fingerprint_model,
        load_model,
    )
    from decoder.model import Decoder
    from decoder.saving import save_folder
    from decoder.settings import OwnSettings, own_settings
    from decoder.source import Source, resolve
    from decoder.tokenizer import (
        Tokenizer,
        has_tokenizer,
        load_tokenizer,
        tokenizer_from_files,
    )
    from decoder.tokenizer_ends import Doubt

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderError",
    "Doubt",
    "EndOfTurn",
    "LoadedModel",
    "ModelDescription",
    "OwnSettings",
    "RopeScaling",
    "Source",
    "Tokenizer",
    "describe_model",
    "encode_chat",
    "encode_turns",
    "end_of_turn",
    "fingerprint_model",
    "from_hugging_face",
    "has_tokenizer",
    "load_model",
    "load_tokenizer",
    "own_settings",
    "render_chat",
    "resolve",
    "save_folder",
    "special_ids",
    "special_text",
    "to_hugging_face",
    "tokenizer_from_files",
]

_HOMES = {
    "Decoder": "model",
    "DecoderConfig": "config",
    "DecoderError": "errors",
    "Doubt": "tokenizer_ends",
    "EndOfTurn": "chat",
    "LoadedModel": "loading",
    "ModelDescription": "loading",
    "OwnSettings": "settings",
    "RopeScaling": "config",
    "Source": "source",
    "Tokenizer": "tokenizer",
    "describe_model": "loading",
    "encode_chat": "chat",
    "encode_turns": "chat",
    "end_of_turn": "chat",
    "fingerprint_model": "loading",
    "from_hugging_face": "config_json",
    "has_tokenizer": "tokenizer",
    "load_model": "loading",
    "load_tokenizer": "tokenizer",
    "own_settings": "settings",
    "render_chat": "chat",
    "resolve": "source",
    "save_folder": "saving",
    "special_ids": "config_json",
    "special_text": "chat",
    "to_hugging_face": "config_json",
    "tokenizer_from_files": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'decoder' has no attribute {name!r}")
    return getattr(importlib.import_module(f"decoder.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
