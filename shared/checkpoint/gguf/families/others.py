"""Phi-3, GLM, Granite, OLMo, Cohere and others with RMS norms, or with norms that have no bias."""

from typing import Any

from shared.checkpoint.gguf.families.family import Architecture, Described, Part
from shared.checkpoint.gguf.families.llama import biases, dense
from shared.checkpoint.gguf.families.parts import (
    around,
    attention,
    gated,
    head_norms,
    matrix,
    norm,
    row_norms,
    tables,
)

_LAYER_EPSILON = "attention.layer_norm_epsilon"
_GATE_UP = matrix("mlp.gate_up_proj", "2f", "h")
_DOWN = matrix("mlp.down_proj", "h", "f")
_NO_BIAS = attention(bias=False, output_bias=False)
_TURNED = attention(turned=True, bias=False, output_bias=False)


def _phi3(found: Described) -> dict[str, Any]:
    # As in llama.cpp all tokens are attended to: released files say a window that their models do not have.
    original = found.keys.whole(
        "rope.scaling.original_context_length", found.keys.whole("context_length")
    )
    return dense(found) | {"sliding_window": None, "original_max_position_embeddings": original}


def _glm(found: Described) -> dict[str, Any]:
    return dense(found) | {"attention_bias": found.in_layers(_queries_bias(found))}


def _queries_bias(found: Described) -> str:
    return "attn_qkv.bias" if found.in_layers("attn_qkv.weight") else "attn_q.bias"


def _granite(found: Described) -> dict[str, Any]:
    keys = found.keys
    return (
        dense(found)
        | biases(found)
        | {
            "attention_multiplier": keys.positive("attention.scale", found.size("d") ** -0.5),
            "embedding_multiplier": keys.positive("embedding_scale", 1.0),
            "residual_multiplier": keys.positive("residual_scale", 1.0),
            "logits_scaling": keys.positive("logit_scale", 1.0),
        }
    )


def _olmo(found: Described) -> dict[str, Any]:
    keys = found.keys
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None,
    }


def _olmo2(found: Described) -> dict[str, Any]:
    return dense(found) | {"attention_bias": False}


def _olmo3(found: Described) -> dict[str, Any]:
    return _olmo2(found) | {
        "sliding_window": found.keys.whole("attention.sliding_window"),
        "layer_types": found.keys.windows(4),
    }


def _cohere(found: Described) -> dict[str, Any]:
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "silu",
        "layer_norm_eps": found.keys.number(_LAYER_EPSILON),
        "logit_scale": found.keys.positive("logit_scale"),
        "attention_bias": False,
        "use_qk_norm": found.in_layers("attn_q_norm.weight"),
    }


def _cohere2(found: Described) -> dict[str, Any]:
    return _cohere(found) | {
        "sliding_window": found.keys.whole("attention.sliding_window"),
        "layer_types": found.keys.windows(4),
    }


def _ernie(found: Described) -> dict[str, Any]:
    return dense(found) | {"use_bias": found.in_layers("attn_q.bias")}


def _seed(found: Described) -> dict[str, Any]:
    return dense(found) | {
        "attention_bias": found.in_layers("attn_q.bias"),
        "attention_out_bias": found.in_layers("attn_output.bias"),
        "mlp_bias": False,
    }


def _smollm3(found: Described) -> dict[str, Any]:
    layers = found.keys.layers()
    # Each fourth layer is not rotated: files do not say it.
    return (
        dense(found)
        | biases(found)
        | {
            "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * layers,
        }
    )


def _exaone4(found: Described) -> dict[str, Any]:
    keys = found.keys
    window = keys.count("attention.sliding_window")
    return dense(found) | {
        "sliding_window": window or None,
        "layer_types": keys.windows(4) if window else ["full_attention"] * keys.layers(),
    }


_GLM = {
    "attn_norm": norm("input_layernorm"),
    "ffn_norm": norm("post_attention_layernorm"),
    **attention(output_bias=False),
    "ffn_up": _GATE_UP,
    "ffn_down": _DOWN,
}
_POST_NORMS = {
    "post_attention_norm": norm("post_attention_layernorm"),
    "post_ffw_norm": norm("post_feedforward_layernorm"),
}
_OLMO2 = {**_NO_BIAS, **row_norms(), **_POST_NORMS, **gated()}
_OLMO3 = Architecture("olmo3", "Olmo3ForCausalLM", _OLMO2, tables(), _olmo3)
_SCALES = frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"))

OTHERS = {
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            **around(),
            "attn_qkv": matrix("self_attn.qkv_proj", "q+k+v", "h"),
            "attn_output": matrix("self_attn.o_proj", "h", "q"),
            "ffn_up": _GATE_UP,
            "ffn_down": _DOWN,
        },
        tables(),
        _phi3,
        rotates_part=True,
    ),
    "chatglm": Architecture("glm", "GlmForCausalLM", _GLM, tables(), _glm, rotates_part=True),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            **_GLM,
            "post_attention_norm": norm("post_self_attn_layernorm"),
            "post_ffw_norm": norm("post_mlp_layernorm"),
        },
        tables(),
        _glm,
        rotates_part=True,
    ),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        {**around(), **attention(turned=True), **gated(bias=None)},
        tables(),
        _granite,
        known=_SCALES,
    ),
    "olmo": Architecture(
        "olmo",
        "OlmoForCausalLM",
        {**_TURNED, **gated()},
        {
            name: part
            for name, part in tables().items()
            if name != "output_norm"  # whose norms have no weights
        },
        _olmo,
        known=frozenset(("attention.clamp_kqv",)),
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _OLMO2,
        tables(),
        _olmo2,
        variant=lambda keys: _OLMO3 if keys.count("attention.sliding_window") else None,
    ),
    "command-r": Architecture(
        "cohere",
        "CohereForCausalLM",
        {
            "attn_norm": norm("input_layernorm"),
            **_NO_BIAS,
            "attn_q_norm": Part("self_attn.q_norm", ("n", "d"), optional=True),
            "attn_k_norm": Part("self_attn.k_norm", ("g", "d"), optional=True),
            **gated(),
        },
        tables(head=False),
        _cohere,
        known=frozenset(("logit_scale",)),
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        {"attn_norm": norm("input_layernorm"), **_NO_BIAS, **gated()},
        tables(head=False),
        _cohere2,
        known=frozenset(("logit_scale",)),
    ),
    "ernie4_5": Architecture(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        {**around(), **attention(), **gated(bias=None)},
        tables(),
        _ernie,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        {
            "attn_norm": norm("input_layernorm"),
            "post_attention_norm": norm("post_attention_layernorm"),
            **attention(),
            **gated(),
        },
        tables(),
        _seed,
    ),
    "smollm3": Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        {**around(), **attention(turned=True), **gated(bias=None)},
        tables(),
        _smollm3,
    ),
    "exaone4": Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        {**_NO_BIAS, **head_norms(), **_POST_NORMS, **gated()},
        tables(),
        _exaone4,
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {
            **around(),
            **attention(),
            **head_norms(names=("self_attn.query_layernorm", "self_attn.key_layernorm")),
            **gated(),
        },
        tables(),
        lambda found: dense(found) | biases(found),
    ),
}
