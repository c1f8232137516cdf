"""A Qwen2 in the layout of Qwen: other names, keys of its own, fused queries, keys and values."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.options import CheckpointOptions

BASE = "qwen2"
TEXT: dict[str, Any] = {"num_key_value_heads": 4}
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "seq_length": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "eos_token_id": "eos_token_id",
}
_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.w1",
    "mlp.gate_proj": "mlp.w2",
    "mlp.down_proj": "mlp.c_proj",
}


def rewrite(saved: Path, folder: Path, chosen: CheckpointOptions) -> None:
    """Writes configuration and tensors of a Qwen2 that transformers saved in the other layout."""
    known = json.loads((saved / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text_config(known)))
    tensors = load_file(saved / "model.safetensors")
    save_file(renamed(tensors), folder / "model.safetensors", {"format": "pt"})


def text_config(known: dict[str, Any]) -> dict[str, Any]:
    """A Qwen2's configuration as Qwen writes it."""
    return {
        **{ours: known[theirs] for ours, theirs in _KEYS.items()},
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "intermediate_size": 2 * known["intermediate_size"],
        "kv_channels": known["hidden_size"] // known["num_attention_heads"],
        "rotary_emb_base": known["rope_parameters"]["rope_theta"],
        "rotary_pct": 1.0,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "scale_attn_weights": True,
    }


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Qwen2's tensors under the names of Qwen."""
    written = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.q_proj(\.\w+)", name)
        if part:
            layer = f"model.layers.{part[1]}.self_attn"
            parts = [tensors[f"{layer}.{kind}_proj{part[2]}"] for kind in "qkv"]
            written[f"transformer.h.{part[1]}.attn.c_attn{part[2]}"] = torch.cat(parts)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            for theirs, ours in _NAMES.items():
                name = name.replace(theirs, ours)
            written[name] = tensor
    return written
