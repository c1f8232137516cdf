"""Gemma's: norms whose weights are counted from one, and stored with that one added."""

from typing import Any

from shared.checkpoint.gguf.families.family import Architecture, Described, Part
from shared.checkpoint.gguf.families.llama import RMS
from shared.checkpoint.gguf.families.parts import (
    around,
    attention,
    gated,
    head_norms,
    norm,
    tables,
)

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Of the 27B of both generations alone queries are scaled by the hidden size for each head; files do not say it.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _gemma(found: Described) -> dict[str, Any]:
    return {
        "intermediate_size": found.size("f"),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": found.keys.number(RMS),
        "attention_bias": False,
    }


def _gemma2(found: Described) -> dict[str, Any]:
    return (
        _gemma(found)
        | _caps(found)
        | {
            "query_pre_attn_scalar": _scalar(found),
            "sliding_window": found.keys.whole("attention.sliding_window", 4096),
            "layer_types": found.keys.windows(2),
        }
    )


def _gemma3(found: Described) -> dict[str, Any]:
    keys = found.keys
    window = keys.count("attention.sliding_window")
    layers = keys.windows(6) if window else ["full_attention"] * keys.layers()
    return (
        _gemma(found)
        | _caps(found)
        | {
            "query_pre_attn_scalar": _scalar(found),
            "sliding_window": window or keys.whole("context_length"),
            "layer_types": layers,
            "rope_local_base_freq": keys.positive("rope.freq_base_swa", 1e4),
        }
    )


def _caps(found: Described) -> dict[str, Any]:
    return {key: found.keys.number(key, 0.0) or None for key in _CAPS}


def _scalar(found: Described) -> int:
    is_27b = found.keys.layers() == _LAYERS_OF_27B[found.keys.architecture]
    return found.size("h") // found.size("n") if is_27b else found.size("d")


def _norms_around(shift: float) -> dict[str, Part]:
    return {
        "attn_norm": norm("input_layernorm", shift),
        "post_attention_norm": norm("post_attention_layernorm", shift),
        "ffn_norm": norm("pre_feedforward_layernorm", shift),
        "post_ffw_norm": norm("post_feedforward_layernorm", shift),
    }


_ATTENTION = attention(bias=False, output_bias=False)

GEMMA = {
    "gemma": Architecture(
        "gemma",
        "GemmaForCausalLM",
        {**around(1.0), **_ATTENTION, **gated()},
        tables(1.0),
        _gemma,
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        {**_norms_around(1.0), **_ATTENTION, **gated()},
        tables(1.0),
        _gemma2,
        known=frozenset(_CAPS),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_norms_around(1.0), **_ATTENTION, **head_norms(1.0), **gated()},
        tables(1.0),
        _gemma3,
        known=frozenset(_CAPS),
    ),
}
