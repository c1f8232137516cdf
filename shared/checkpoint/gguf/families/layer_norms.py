"""Models with layer norms that have biases: GPT-NeoX, Phi-2, StarCoder2, StableLM, Nemotron."""

from typing import Any

from shared.checkpoint.gguf.families.family import Architecture, Described, Part
from shared.checkpoint.gguf.families.parts import around, attention, gated, matrix, norm, tables

_EPSILON = "attention.layer_norm_epsilon"


def _gpt_neox(found: Described) -> dict[str, Any]:
    keys = found.keys
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "gelu",
        "layer_norm_eps": keys.number(_EPSILON),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": found.in_layers("attn_qkv.bias"),
    }


def _phi(found: Described) -> dict[str, Any]:
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "gelu_new",
        "layer_norm_eps": found.keys.number(_EPSILON),
        "qk_layernorm": False,
    }


def _starcoder2(found: Described) -> dict[str, Any]:
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": found.keys.number(_EPSILON),
        "use_bias": found.in_layers("attn_q.bias"),
        "sliding_window": None,
    }


def _stablelm(found: Described) -> dict[str, Any]:
    one_norm = not found.in_layers("ffn_norm.weight")
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "silu",
        "layer_norm_eps": found.keys.number(_EPSILON),
        "use_qkv_bias": found.in_layers("attn_q.bias"),
        "qk_layernorm": found.in_layers("attn_q_norm.weight"),
        "use_parallel_residual": one_norm,
    }


def _nemotron(found: Described) -> dict[str, Any]:
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "relu2",
        "norm_eps": found.keys.number(_EPSILON),
        "attention_bias": found.in_layers("attn_q.bias"),
        "mlp_bias": found.in_layers("ffn_up.bias"),
    }


def _plain(up: str, down: str, bias: bool | None) -> dict[str, Part]:
    """An MLP without gates."""
    return {"ffn_up": matrix(up, "f", "h", bias), "ffn_down": matrix(down, "h", "f", bias)}


LAYER_NORMS = {
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            **around(bias=True),
            "attn_qkv": Part("attention.query_key_value", ("q+k+v", "h"), together=True, bias=None),
            "attn_output": matrix("attention.dense", "h", "q", None),
            **_plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", True),
        },
        {
            "token_embd": Part("gpt_neox.embed_in", ("t", "h")),
            "output_norm": norm("gpt_neox.final_layer_norm", bias=True),
            "output": Part("embed_out", ("t", "h"), optional=True),
        },
        _gpt_neox,
        prefix="gpt_neox.layers.",
        rotates_part=True,
    ),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        {
            "attn_norm": norm("input_layernorm", bias=True),
            **{
                name: part
                for name, part in attention(bias=True, output_bias=True).items()
                if name != "attn_output"
            },
            "attn_output": matrix("self_attn.dense", "h", "q", True),
            **_plain("mlp.fc1", "mlp.fc2", True),
        },
        {
            "token_embd": Part("model.embed_tokens", ("t", "h")),
            "output_norm": norm("model.final_layernorm", bias=True),
            "output": Part("lm_head", ("t", "h"), bias=True),
        },
        _phi,
        rotates_part=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {**around(bias=True), **attention(), **_plain("mlp.c_fc", "mlp.c_proj", None)},
        tables(norm_bias=True),
        _starcoder2,
    ),
    "stablelm": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        {
            "attn_norm": norm("input_layernorm", bias=True),
            "ffn_norm": Part("post_attention_layernorm", ("h",), bias=True, optional=True),
            **attention(output_bias=False),
            "attn_q_norm": Part("self_attn.q_layernorm.norms.{}", ("n", "d"), optional=True),
            "attn_k_norm": Part("self_attn.k_layernorm.norms.{}", ("g", "d"), optional=True),
            **gated(),
        },
        tables(norm_bias=True),
        _stablelm,
        rotates_part=True,
    ),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        {
            **around(1.0, bias=True),
            **attention(),
            **_plain("mlp.up_proj", "mlp.down_proj", None),
        },
        tables(1.0, norm_bias=True),
        _nemotron,
        rotates_part=True,
    ),
}
