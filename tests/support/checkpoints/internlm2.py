"""A Llama in the layout of InternLM2: other names, each key head's queries, key and value one after the other."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.options import CheckpointOptions

BASE = "llama"
TEXT: dict[str, Any] = {}
_NAMES = {
    "embed_tokens.": "tok_embeddings.",
    "lm_head.": "output.",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def rewrite(saved: Path, folder: Path, chosen: CheckpointOptions) -> None:
    """Writes configuration and tensors of a Llama that transformers saved in the other layout."""
    config = json.loads((saved / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text_config(config)))
    tensors = load_file(saved / "model.safetensors")
    save_file(renamed(tensors, config), folder / "model.safetensors", {"format": "pt"})


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A Llama's configuration as InternLM2 writes it."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "bias": config.pop("attention_bias", False)}
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    return {**config, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}


def renamed(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A Llama's tensors under the names of InternLM2."""
    written = {}
    groups = config["num_key_value_heads"]
    for name, tensor in tensors.items():
        part = re.fullmatch(r"(.*layers\.\d+\.)self_attn\.q_proj(\.\w+)", name)
        if part:
            parts = [tensors[f"{part[1]}self_attn.{kind}_proj{part[2]}"] for kind in "qkv"]
            apart = [p.view(groups, -1, config["head_dim"], *p.shape[1:]) for p in parts]
            rows = torch.cat(apart, 1).flatten(0, 2)
            written[f"{part[1]}attention.wqkv{part[2]}"] = rows.contiguous()
        elif not re.search(r"self_attn\.[kv]_proj", name):
            for theirs, ours in _NAMES.items():
                name = name.replace(theirs, ours)
            written[name] = tensor
    return written
