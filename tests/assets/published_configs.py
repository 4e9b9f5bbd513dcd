"""What stands in the config.json of published models: each family, and each release that changed
its keys. Of long lists only what generates them is here.
"""

from typing import Any

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _sizes(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, positions: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
    }


def _named(family: str, architecture: str, version: str, **more: Any) -> dict[str, Any]:
    named = {
        "model_type": family,
        "architectures": [architecture],
        "transformers_version": version,
    }
    return {**_COMMON, **named, **more}


def _llama(version: str, **more: Any) -> dict[str, Any]:
    own = {"pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None}
    own |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    return _named("llama", "LlamaForCausalLM", version, **{**own, **more})


def _llama3(**more: Any) -> dict[str, Any]:
    own = {"attention_bias": False, "rope_theta": 500000.0, "bos_token_id": 128000}
    return _llama("4.40.0.dev0", **{**own, "eos_token_id": 128001, **more})


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def _mistral(version: str, **more: Any) -> dict[str, Any]:
    own = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    return _named("mistral", "MistralForCausalLM", version, **{**own, **more})


def _mixtral(**more: Any) -> dict[str, Any]:
    own = {
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    return _named("mixtral", "MixtralForCausalLM", "4.36.0.dev0", **{**own, **more})


def _qwen2(version: str, **more: Any) -> dict[str, Any]:
    own = {
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return _named("qwen2", "Qwen2ForCausalLM", version, **{**own, **more})


def _qwen3(**more: Any) -> dict[str, Any]:
    own = {
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return _named("qwen3", "Qwen3ForCausalLM", "4.51.0", **{**own, **more})


def _qwen3_moe(**more: Any) -> dict[str, Any]:
    own = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        **_sizes(2048, 6144, 48, 32, 4, 40960, 151936),
    }
    return _qwen3(**{**own, **more})


def _gemma(**more: Any) -> dict[str, Any]:
    own = {
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    }
    named = _named("gemma", "GemmaForCausalLM", "4.38.0.dev0")
    return {**named, **own, **_sizes(2048, 16384, 18, 8, 1, 8192, 256000), **more}


_TANH = "gelu_pytorch_tanh"


def _gemma2(**more: Any) -> dict[str, Any]:
    own = {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "hidden_act": _TANH,
        "hidden_activation": _TANH,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        **_sizes(2304, 9216, 26, 8, 4, 8192, 256000),
    }
    return _gemma(**{**own, **more})


def _gemma3(**more: Any) -> dict[str, Any]:
    own = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "hidden_activation": _TANH,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        **_sizes(1152, 6912, 26, 4, 1, 32768, 262144),
    }
    config = {**_gemma(**own), **more}
    del config["hidden_act"]
    return config


def _gemma3_sees(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
        "initializer_range": 0.02,
        "text_config": {
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        **more,
    }


def _phi3(**more: Any) -> dict[str, Any]:
    own = {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        **_sizes(3072, 8192, 32, 32, 32, 4096, 32064),
    }
    return _named("phi3", "Phi3ForCausalLM", "4.40.2", **{**own, **more})


def _olmo2(**more: Any) -> dict[str, Any]:
    own = {
        "attention_bias": False,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return _named("olmo2", "Olmo2ForCausalLM", "4.47.0.dev0", **{**own, **more})


def _smollm3(**more: Any) -> dict[str, Any]:
    own = {
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 128012,
        "pad_token_id": 128004,
        "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_cache": False,
        "use_sliding_window": False,
        **_sizes(2048, 11008, 36, 16, 4, 65536, 128256),
    }
    return _named("smollm3", "SmolLM3ForCausalLM", "4.54.0.dev0", **{**own, **more})


_SMOLLM2 = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "attention_bias": False,
    "is_llama_config": True,
    "mlp_bias": False,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}

LOADED: dict[str, dict[str, Any]] = {
    "Llama 2 7B": _llama("4.31.0.dev0", **_sizes(4096, 11008, 32, 32, 32, 4096, 32000)),
    "Llama 2 7B chat, first": _llama(
        "4.32.0.dev0", **_sizes(4096, 11008, 32, 32, 32, 4096, 32000), max_length=4096
    ),
    "Vicuna 7B v1.5": _llama(
        "4.55.1",
        **_sizes(4096, 11008, 32, 32, 32, 4096, 32000),
        _name_or_path="vicuna-7b-v1.5",
        max_sequence_length=4096,
        tokenizer_padding_side="right",
        tokenizer_model_max_length=4096,
        neftune_noise_alpha=5,
    ),
    "TinyLlama 1.1B chat": _llama(
        "4.35.0", **_sizes(2048, 5632, 22, 32, 4, 2048, 32000), attention_bias=False
    ),
    "Llama 3 8B": _llama3(**_sizes(4096, 14336, 32, 32, 8, 8192, 128256)),
    "Llama 3.1 8B Instruct": _llama3(
        **_sizes(4096, 14336, 32, 32, 8, 131072, 128256),
        eos_token_id=[128001, 128008, 128009],
        mlp_bias=False,
        rope_scaling=_llama3_rope(8.0),
    ),
    "Llama 3.2 1B": _llama3(
        **_sizes(2048, 8192, 16, 32, 8, 131072, 128256),
        head_dim=64,
        mlp_bias=False,
        rope_scaling=_llama3_rope(32.0),
        tie_word_embeddings=True,
    ),
    "Llama 3.2 1B, by unsloth": _llama3(
        **_sizes(2048, 8192, 16, 32, 8, 131072, 128256),
        head_dim=64,
        mlp_bias=False,
        pad_token_id=128004,
        rope_scaling=_llama3_rope(32.0),
        tie_word_embeddings=True,
        unsloth_fixed=True,
        unsloth_version="2025.3.19",
    ),
    "R1 distill of Llama 8B": _llama3(
        **_sizes(4096, 14336, 32, 32, 8, 131072, 128256),
        mlp_bias=False,
        rope_scaling=_llama3_rope(8.0),
    ),
    "SmolLM 135M": _llama(
        "4.42.3",
        **_sizes(576, 1536, 30, 9, 3, 2048, 49152),
        attention_bias=False,
        mlp_bias=False,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    ),
    "SmolLM2 135M Instruct": _llama(
        "4.42.3", **_sizes(576, 1536, 30, 9, 3, 8192, 49152), rope_theta=100000, **_SMOLLM2
    ),
    "Llama as transformers 5 writes it": {
        key: value
        for key, value in {
            **_llama3(**_sizes(2048, 8192, 16, 32, 8, 131072, 128256), head_dim=64),
            "dtype": "bfloat16",
            "mlp_bias": False,
            "pad_token_id": None,
            "rope_parameters": {**_llama3_rope(32.0), "rope_theta": 500000.0},
        }.items()
        if key not in ("torch_dtype", "rope_scaling", "rope_theta")
    },
    "Mistral 7B v0.1": _mistral(
        "4.34.0.dev0",
        **_sizes(4096, 14336, 32, 32, 8, 32768, 32000),
        rope_theta=10000.0,
        sliding_window=4096,
    ),
    "Mistral 7B Instruct v0.2": _mistral(
        "4.36.0",
        **_sizes(4096, 14336, 32, 32, 8, 32768, 32000),
        rope_theta=1000000.0,
        sliding_window=None,
    ),
    "Mistral 7B v0.3": _mistral(
        "4.42.0.dev0",
        **_sizes(4096, 14336, 32, 32, 8, 32768, 32768),
        rope_theta=1000000.0,
        sliding_window=None,
    ),
    "Zephyr 7B": _mistral(
        "4.35.0",
        **_sizes(4096, 14336, 32, 32, 8, 32768, 32000),
        _name_or_path="zephyr",
        pad_token_id=2,
        rope_theta=10000.0,
        sliding_window=4096,
        _flash_attn_2_enabled=True,
    ),
    "Mistral Nemo 12B": _mistral(
        "4.43.0.dev0",
        **_sizes(5120, 14336, 40, 32, 8, 1024000, 131072),
        head_dim=128,
        rope_theta=1000000.0,
        sliding_window=None,
    ),
    "Ministral 8B": _mistral(
        "4.46.0.dev0",
        **_sizes(4096, 12288, 36, 32, 8, 32768, 131072),
        head_dim=128,
        rope_theta=100000000.0,
        sliding_window=32768,
    ),
    "Mixtral 8x7B": _mixtral(
        **_sizes(4096, 14336, 32, 32, 8, 32768, 32000), router_aux_loss_coef=0.02
    ),
    "Mixtral 8x22B": _mixtral(
        **_sizes(6144, 16384, 56, 48, 8, 65536, 32768),
        router_aux_loss_coef=0.001,
        router_jitter_noise=0.0,
    ),
    "Qwen 1.5 0.5B": _qwen2(
        "4.37.0",
        **_sizes(1024, 2816, 24, 16, 16, 32768, 151936),
        max_window_layers=21,
        sliding_window=32768,
        tie_word_embeddings=True,
    ),
    "Qwen 2 7B Instruct": _qwen2(
        "4.41.2",
        **_sizes(3584, 18944, 28, 28, 4, 32768, 152064),
        eos_token_id=151645,
        max_window_layers=28,
        sliding_window=131072,
    ),
    "Qwen 2.5 0.5B": _qwen2(
        "4.40.1",
        **_sizes(896, 4864, 24, 14, 2, 32768, 151936),
        max_window_layers=24,
        sliding_window=32768,
        tie_word_embeddings=True,
        use_mrope=False,
    ),
    "Qwen 2.5 1.5B": _qwen2(
        "4.40.1",
        **_sizes(1536, 8960, 28, 12, 2, 131072, 151936),
        max_window_layers=28,
        sliding_window=131072,
        tie_word_embeddings=True,
        use_mrope=False,
    ),
    "Qwen 2.5 7B Instruct": _qwen2(
        "4.43.1",
        **_sizes(3584, 18944, 28, 28, 4, 32768, 152064),
        eos_token_id=151645,
        max_window_layers=28,
        sliding_window=131072,
    ),
    "Qwen 2.5 as transformers 5 writes it": {
        **_qwen2(
            "5.0.0",
            **_sizes(1536, 8960, 28, 12, 2, 131072, 151936),
            dtype="bfloat16",
            layer_types=["full_attention"] * 28,
            max_window_layers=28,
            pad_token_id=None,
            sliding_window=None,
            tie_word_embeddings=True,
            use_mrope=False,
        ),
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "R1 distill of Qwen 1.5B": _qwen2(
        "4.44.0",
        **_sizes(1536, 8960, 28, 12, 2, 131072, 151936),
        rope_theta=10000,
        max_window_layers=21,
        sliding_window=4096,
        use_mrope=False,
    ),
    "R1 distill of Qwen 32B": _qwen2(
        "4.43.1",
        **_sizes(5120, 27648, 64, 40, 8, 131072, 152064),
        rms_norm_eps=1e-5,
        max_window_layers=64,
        sliding_window=131072,
    ),
    "Qwen 3 0.6B": _qwen3(
        **_sizes(1024, 3072, 28, 16, 8, 40960, 151936),
        max_window_layers=28,
        tie_word_embeddings=True,
    ),
    "Qwen 3 8B": _qwen3(**_sizes(4096, 12288, 36, 32, 8, 40960, 151936), max_window_layers=36),
    "Qwen 3 30B A3B": _qwen3_moe(max_window_layers=48),
    "Qwen 3 Coder 30B A3B": _qwen3_moe(
        max_position_embeddings=262144,
        max_window_layers=28,
        qkv_bias=False,
        rope_theta=10000000,
        router_aux_loss_coef=0.0,
        shared_expert_intermediate_size=0,
        use_qk_norm=True,
    ),
    "Gemma 2B, first": _gemma(hidden_act="gelu"),
    "Gemma 1.1 2B": _gemma(hidden_act=_TANH, hidden_activation=_TANH),
    "Gemma 7B": _gemma(
        **_sizes(3072, 24576, 28, 16, 16, 8192, 256000), hidden_act="gelu", hidden_activation=None
    ),
    "Gemma 2 2B": _gemma2(),
    "Gemma 2 9B": _gemma2(
        **_sizes(3584, 14336, 42, 16, 8, 8192, 256000),
        _attn_implementation="eager",
        eos_token_id=[1, 107],
        sliding_window_size=4096,
    ),
    "Gemma 2 27B": _gemma2(
        **_sizes(4608, 36864, 46, 32, 16, 8192, 256000),
        head_dim=128,
        query_pre_attn_scalar=144,
        sliding_window_size=4096,
        use_cache=True,
    ),
    "Gemma 3 1B": _gemma3(),
    "Gemma 3 270M": _gemma3(
        **_sizes(640, 2048, 18, 4, 1, 32768, 262144),
        _sliding_window_pattern=6,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        rope_local_base_freq=10000.0,
        rope_theta=1000000.0,
        use_bidirectional_attention=False,
    ),
    "Gemma 3 4B": _gemma3_sees(
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    ),
    "Gemma 3 27B": _gemma3_sees(
        {
            **_sizes(5376, 21504, 62, 32, 16, 131072, 262208),
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
        }
    ),
    "Phi 3 mini 4k": _phi3(),
    "Phi 4": _phi3(
        **_sizes(5120, 17920, 40, 40, 10, 16384, 100352),
        bos_token_id=100257,
        eos_token_id=100265,
        pad_token_id=100349,
        original_max_position_embeddings=16384,
        rope_theta=250000,
        sliding_window=None,
    ),
    "OLMo 2 7B": _olmo2(**_sizes(4096, 11008, 32, 32, 32, 4096, 100352)),
    "OLMo 2 1B": _olmo2(
        **_sizes(2048, 8192, 16, 16, 16, 4096, 100352), transformers_version="4.50.3"
    ),
    "SmolLM3 3B": _smollm3(),
}

# What no decoder here computes, and the key that says so.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Phi 3.5 mini": (
        _phi3(
            max_position_embeddings=131072,
            sliding_window=262144,
            rope_scaling={
                "type": "longrope",
                "long_factor": [1.0] * 48,
                "short_factor": [1.0] * 48,
            },
        ),
        "rope_scaling has the type 'longrope'",
    ),
    "Phi 4 mini": (
        _phi3(
            **_sizes(3072, 8192, 32, 24, 8, 131072, 200064),
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            mlp_bias=False,
            partial_rotary_factor=0.75,
            sliding_window=262144,
        ),
        "partial_rotary_factor is 0.75",
    ),
    "R1 0528 distill of Qwen 3 8B": (
        _qwen3(
            **_sizes(4096, 12288, 36, 32, 8, 131072, 151936),
            max_window_layers=36,
            rope_scaling={
                "attn_factor": 0.8782488562869419,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "rope_type": "yarn",
            },
        ),
        "rope_scaling has the type 'yarn'",
    ),
    "Qwen 2.5 7B 1M": (
        _qwen2(
            "4.47.1",
            **_sizes(3584, 18944, 28, 28, 4, 1010000, 152064),
            max_window_layers=28,
            sliding_window=32768,
            dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192},
        ),
        "the field dual_chunk_attention_config",
    ),
    "Llama 3.1 8B in 4 bits": (
        _llama3(
            **_sizes(4096, 14336, 32, 32, 8, 131072, 128256),
            quantization_config={"load_in_4bit": True, "quant_method": "bitsandbytes"},
        ),
        "quantization_config is",
    ),
}
