"""Llama's block: RMS norms, rotary attention of grouped queries, SwiGLU; and such blocks with experts."""

from typing import Any

from shared.checkpoint.gguf.families.family import Architecture, Described, Part
from shared.checkpoint.gguf.families.parts import (
    around,
    attention,
    experts,
    gated,
    head_norms,
    row_norms,
    shared_expert,
    tables,
)

RMS = "attention.layer_norm_rms_epsilon"
# How many layers a Baichuan has whose attention counts distances instead of turning (ALiBi).
_ALIBI_LAYERS = 40


def dense(found: Described) -> dict[str, Any]:
    """What all of these have."""
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "silu",
        "rms_norm_eps": found.keys.number(RMS),
    }


def biases(found: Described) -> dict[str, Any]:
    """Where Llama's block may have them."""
    return {
        "attention_bias": any(found.in_layers(f"attn_{part}.bias") for part in ("q", "qkv")),
        "mlp_bias": found.in_layers("ffn_gate.bias"),
    }


def _llama(found: Described) -> dict[str, Any]:
    return dense(found) | biases(found)


def _qwen(found: Described) -> dict[str, Any]:
    return dense(found) | {"use_sliding_window": False}


def _qwen3(found: Described) -> dict[str, Any]:
    bias = found.in_layers("attn_q.bias")
    return dense(found) | {"use_sliding_window": False, "attention_bias": bias}


def _baichuan(found: Described) -> dict[str, Any]:
    if found.keys.layers() >= _ALIBI_LAYERS:
        raise found.header.refusal(
            f"baichuan.block_count is {found.keys.layers()}: Baichuan 13B, whose attention has no rotation (ALiBi), is"
            " not supported; that with 32 layers is"
        )
    return dense(found)


def _routed(found: Described) -> dict[str, Any]:
    """Of layers with experts, as most classes call it."""
    return {
        "num_experts": found.size("e"),
        "num_experts_per_tok": found.keys.whole("expert_used_count"),
        "moe_intermediate_size": found.size("m"),
        "hidden_act": "silu",
        "rms_norm_eps": found.keys.number(RMS),
        "router_aux_loss_coef": 0.0,
    }


def _mixtral(found: Described) -> dict[str, Any]:
    return {
        "num_local_experts": found.size("e"),
        "num_experts_per_tok": found.keys.whole("expert_used_count"),
        "intermediate_size": found.size("m"),
        "hidden_act": "silu",
        "rms_norm_eps": found.keys.number(RMS),
        "sliding_window": None,
    }


def _qwen2_moe(found: Described) -> dict[str, Any]:
    return _routed(found) | {
        "shared_expert_intermediate_size": found.size("s"),
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "qkv_bias": any(found.in_layers(f"attn_{part}.bias") for part in ("q", "qkv")),
        "use_sliding_window": False,
    }


def _qwen3_moe(found: Described) -> dict[str, Any]:
    return _routed(found) | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "attention_bias": found.in_layers("attn_q.bias"),
        "use_sliding_window": False,
    }


def _olmoe(found: Described) -> dict[str, Any]:
    return _routed(found) | {
        "intermediate_size": found.size("m"),
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": None,
    }


_ROUTED = frozenset(("expert_count",))
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {
        **around(),
        **attention(turned=True, bias=False, output_bias=False),
        **experts("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    },
    tables(),
    _mixtral,
    known=_ROUTED,
)
_LLAMA = {**around(), **attention(turned=True), **gated(bias=None)}
_QWEN2 = {**around(), **attention(bias=True, output_bias=False), **gated()}

LLAMA = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        _LLAMA,
        tables(),
        _llama,
        known=_ROUTED,
        variant=lambda keys: _MIXTRAL if keys.count("expert_count") else None,
    ),
    "internlm2": Architecture("llama", "LlamaForCausalLM", _LLAMA, tables(), _llama),
    "xverse": Architecture("llama", "LlamaForCausalLM", _LLAMA, tables(), _llama),
    "baichuan": Architecture("llama", "LlamaForCausalLM", _LLAMA, tables(), _baichuan),
    "exaone": Architecture(
        "llama",
        "LlamaForCausalLM",
        {**around(), **attention(bias=False, output_bias=False), **gated()},
        tables(),
        _llama,
    ),
    # Queries, keys and values in one matrix; the MLP is half as wide as Qwen's config.json said.
    "qwen": Architecture("qwen2", "Qwen2ForCausalLM", _QWEN2, tables(), _qwen),
    # Of text, whose three positions are one number.
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", _QWEN2, tables(), _qwen),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _QWEN2, tables(), _qwen),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        {**around(), **attention(), **head_norms(), **gated()},
        tables(),
        _qwen3,
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **around(),
            **attention(output_bias=False),
            **experts(),
            **shared_expert(),
            "ffn_gate_inp_shexp": Part("mlp.shared_expert_gate", ("1", "h")),
        },
        tables(),
        _qwen2_moe,
        known=_ROUTED,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**around(), **attention(output_bias=False), **head_norms(), **experts()},
        tables(),
        _qwen3_moe,
        known=_ROUTED,
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        {**around(), **attention(bias=False, output_bias=False), **row_norms(), **experts()},
        tables(),
        _olmoe,
        known=_ROUTED,
    ),
}
