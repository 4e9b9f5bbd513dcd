"""A checkpoint's folder with every setting that changes no number, as published ones have them."""

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": [2, 0],
    "pad_token_id": 1,
    "use_cache": False,
    "initializer_range": 0.01,
    "attention_dropout": 0.1,
    "task_specific_params": {"chat": {"top_k": 7}},
    "max_length": 33,
}
# Of the file they stand in, or of code that is not beside an export.
LEFT_OUT: dict[str, Any] = {
    "torch_dtype": "float16",
    "dtype": "float16",
    "transformers_version": "4.1",
    "_name_or_path": "elsewhere",
    "auto_map": {"AutoConfig": "code.Config"},
    "attn_implementation": "flash_attention_2",
    "use_mrope": False,
}
GENERATION: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "stop_strings": ["\n\n"],
    "transformers_version": "4.45.0.dev0",
}
TOKENIZER: dict[str, Any] = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True},
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "model_max_length": 2048,
    "padding_side": "left",
    "truncation_side": "left",
    "clean_up_tokenization_spaces": False,
    "chat_template": "{{ messages }}",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
FILES = {
    "generation_config.json": json.dumps(GENERATION, indent=4),
    "tokenizer_config.json": json.dumps(TOKENIZER, indent=1),
    "special_tokens_map.json": json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|im_start|>"}),
    "added_tokens.json": json.dumps({"<|im_end|>": 2}),
    "chat_template.jinja": "{{ bos_token }}{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "merges.txt": "#version: 0.2\n",
    "vocab.json": "{}",
    "tokenizer.model": "\x0a\x05",
}
# No part of the model's settings.
OTHERS = {"README.md": "#", "code.py": "", "onnx/config.json": "{}", "trainer_state.json": "{}"}


def add_settings(folder: Path) -> Path:
    """Puts all of them into a folder that holds a checkpoint."""
    for name, text in {**FILES, **OTHERS}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **CONFIG, **LEFT_OUT}))
    return folder


def assert_exported(folder: Path, source: dict[str, bytes], dtype: str = "float32") -> None:
    """The folder has the source's settings, byte for byte or key by key, and nothing beside."""
    written = json.loads((folder / "config.json").read_text())
    assert {key: written[key] for key in CONFIG} == CONFIG
    assert not written.keys() & (LEFT_OUT.keys() - {"torch_dtype"})
    assert written["torch_dtype"] == dtype
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert found.keys() == FILES.keys() | {"config.json", "model.safetensors", "tokenizer.json"}
    for name in (*FILES, "tokenizer.json"):
        assert found[name] == source[name], name
