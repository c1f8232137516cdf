"""A GLM in the layout of ChatGLM2: other names, keys of its own, fused queries, keys and values."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.options import CheckpointOptions

BASE = "glm"
TEXT: dict[str, Any] = {}
_KEYS = {
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "num_attention_heads": "num_attention_heads",
    "multi_query_group_num": "num_key_value_heads",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
    "eos_token_id": "eos_token_id",
    "tie_word_embeddings": "tie_word_embeddings",
}
_NAMES = {
    "model.embed_tokens.": "transformer.embedding.word_embeddings.",
    "lm_head.": "transformer.output_layer.",
    "model.norm.": "transformer.encoder.final_layernorm.",
    "model.layers.": "transformer.encoder.layers.",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def rewrite(saved: Path, folder: Path, chosen: CheckpointOptions) -> None:
    """Writes configuration and tensors of a GLM that transformers saved in the other layout."""
    known = json.loads((saved / "config.json").read_text())
    config = {ours: known[theirs] for ours, theirs in _KEYS.items()}
    config |= {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "multi_query_attention": True,
        "rmsnorm": True,
        "original_rope": True,
        "quantization_bit": 0,
        "pre_seq_len": None,
        "rope_ratio": known["rope_parameters"]["rope_theta"] / 10_000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(saved / "model.safetensors")
    written = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"(model\.layers\.\d+\.)self_attn\.q_proj(\.\w+)", name)
        if part:
            parts = [tensors[f"{part[1]}self_attn.{kind}_proj{part[2]}"] for kind in "qkv"]
            written[_renamed(f"{part[1]}self_attention.query_key_value{part[2]}")] = torch.cat(
                parts
            )
        elif not re.search(r"self_attn\.[kv]_proj", name):
            written[_renamed(name)] = tensor
    written["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    save_file(written, folder / "model.safetensors", {"format": "pt"})


def _renamed(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
