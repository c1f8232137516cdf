"""Folders of LoRA adapters, written without PEFT."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

MODULE = "model.layers.0.self_attn.q_proj"
SIZES = {MODULE: (8, 6)}  # outputs and inputs


def write_adapter(
    folder: Path,
    seed: int = 0,
    rank: int = 2,
    sizes: Mapping[str, tuple[int, int]] = SIZES,
    tensors: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """tensors: others beside those of the linear layers."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    written = dict(tensors or {})
    for module, (outputs, inputs) in sizes.items():
        prefix = f"base_model.model.{module}"
        written[f"{prefix}.lora_A.weight"] = draw.random((rank, inputs), np.float32)
        written[f"{prefix}.lora_B.weight"] = draw.random((outputs, rank), np.float32)
    save_file(written, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
