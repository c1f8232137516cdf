"""A tiny configuration of any model type, by the names that configurations have in common."""

from typing import Any

from transformers import PreTrainedConfig

_LAYERS = 4
_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "model_dim", "emb_dim"), 64
    ),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "attention_hidden_size"), 64),
    **dict.fromkeys(
        ("n_layer", "num_layers", "n_layers", "num_hidden_layers", "decoder_layers"), _LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "kv_n_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "encoder_layers", "num_codebooks"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "mlp_hidden_size"), 96),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 256
    ),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window"), 8),
    **dict.fromkeys(("local_attention", "window_size", "chunk_size", "state_size"), 8),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state", "mamba_num_heads", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "mamba_d_head"), 32),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "bos_token_id"), 1),
    **dict.fromkeys(("linear_num_key_heads", "expand", "max_window_layers", "index_n_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "conv_kernel", "time_step_rank"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), 16),
    **dict.fromkeys(("index_head_dim", "hidden_size_per_layer_input", "kv_lora_rank"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "index_topk": 512,
    "num_kv_shared_layers": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
# None is a meaning of its own for these.
_KEPT_NONE = ("sliding_window", "attention_chunk_size", "q_lora_rank", "n_inner")
_LATENT = ("qk_rope_head_dim", "kv_lora_rank")


# What single types need beside. Layers of others than attention are left out: configurations with these are refused.
_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_OF_TYPES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        **_WINDOWS, "rope_parameters": {"sliding_attention": _ROTATION, "full_attention": _ROTATION}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 32, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2
        },
    },
    "dots3_note_text": {
        "shared_experts_intermediate_size": 32, "layer_types": ["full_attention"] * _LAYERS
    },
    "gemma3n_text": {"laurel_rank": 8, "activation_sparsity_pattern": [0.5] + [0.0] * 3},
    "gemma4_text": _WINDOWS,
    "gemma4_unified_text": _WINDOWS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["full_attention"] * _LAYERS},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The class's defaults with small sizes, also of the models that it wraps. Raises whatever the class raises at
    sizes that do not fit each other."""
    plain = kind()
    defaults = plain.to_dict()
    values = {
        key: value
        for key, value in _SMALL.items()
        if key in defaults
        and not isinstance(defaults[key], list | dict)
        and not (defaults[key] is None and key in _KEPT_NONE)
    }
    if any(key in values for key in _LATENT):
        values.pop("head_dim", None)
        if "num_key_value_heads" in values:
            values["num_key_value_heads"] = 4
    parts = {name: getattr(plain, name, None) for name in kind.sub_configs}
    values |= {
        name: tiny_config(type(part)).to_dict()
        for name, part in parts.items()
        if isinstance(part, PreTrainedConfig)
    }
    return kind(**{**values, **_OF_TYPES.get(kind.model_type, {})})
