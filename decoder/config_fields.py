"""Single fields of a parsed config.json, each of its type, and the keys that change no number."""

from collections.abc import Mapping
from typing import Any

from decoder.errors import DecoderError

# Keys that say how a checkpoint was trained, saved or sampled from, not what
# numbers its forward pass gives.
BOOKKEEPING = frozenset(
    [
        "_attn_implementation_autoset",
        "_attn_implementation",
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "gradient_checkpointing",
        "pretraining_tp",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "unk_token_id",
        "auto_map",
        "is_llama_config",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "torchscript",
        "use_bfloat16",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "prefix",
        "tokenizer_class",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "cache_implementation",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    ]
)


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    if key not in config and default is None:
        raise DecoderError(f"config.json: the field {key} is missing")
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecoderError(f"config.json: {key} is {value!r}; expected a whole number")
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DecoderError(f"config.json: {key} is {value!r}; expected a number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise DecoderError(f"config.json: {key} is {value!r}; expected true or false")
    return value
