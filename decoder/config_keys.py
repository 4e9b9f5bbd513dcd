"""Keys of a config.json that change no number of the model's forward pass, at any value or at one.

What is neither here nor among the keys of a family (`families`) is refused unless it is null.
Also false is refused there: a switch may be on where nothing is said (`is_causal`, `use_qk_norm`).
"""

from typing import Any

# What the model says of its use and of its further training; exports keep it.
SETTINGS = frozenset(
    [
        # Special tokens
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words_ids",
        # Generation, which older files hold
        "max_length",
        "max_new_tokens",
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
        "num_return_sequences",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "cache_implementation",
        "use_cache",
        # Tokenizer
        "model_max_length",
        "prefix",
        "tokenizer_class",
        "tokenizer_model_max_length",
        "tokenizer_padding_side",
        # Tasks
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        # Training
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "resid_pdrop",
        "initializer_factor",
        "initializer_range",
        "loss_type",
        "neftune_noise_alpha",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "router_z_loss_coef",
        "pretraining_tp",
        "transformers.js_config",
    ]
)

# What is said of the file, of the program that wrote it, or of how a program is to compute the
# same; an export is another file.
REMARKS = frozenset(
    [
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "architectures",
        "auto_map",
        "custom_pipelines",
        "dtype",
        "torch_dtype",
        "use_bfloat16",
        "torchscript",
        "tf_legacy_loss",
        "is_decoder",
        "is_llama_config",
        "unsloth_fixed",
        "unsloth_version",
        "unsloth_tied_fixed",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
        "experts_implementation",
        "_flash_attn_2_enabled",
        "flash_attn",
        "use_flash_attn",
        "use_flash_attention",
        "use_flash_attention_2",
        "gradient_checkpointing",
        "chunk_size_feed_forward",
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "seq_length",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
    ]
)

HARMLESS = SETTINGS | REMARKS

# Keys that change nothing at these values (and at null), whatever the family; where a family
# understands the key, or has other such values in `Family.off`, that counts.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Attention
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "mrope_section": ([],),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rotary_percent": (1,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    # Biases
    "attention_bias": (False,),
    "attention_out_bias": (False,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    # Further parts
    "num_nextn_predict_layers": (0,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "use_parallel_residual": (False,),
    "pruned_heads": ({},),
    "quantization_config": (),
}

# A second name of a family's key, beside which it says nothing if both are equal.
SAME = {"sliding_window_size": "sliding_window"}
