"""Rotations as transformers makes them, wherever the original length stands in the configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.decoder.models.rope import rope_table
from services.families import registry
from shared.checkpoint.folder import Checkpoint
from tests.support.checkpoints import load_reference, make_checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("beside", "among"), [(64, None), (64, 128), (None, 64), (None, None)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_original_length_counts(
    tmp_path: Path, kind: str, beside: int | None, among: int | None, spelling: str
) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config[spelling] = {"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]}
    if beside:
        config["original_max_position_embeddings"] = beside
    if among:
        config[spelling]["original_max_position_embeddings"] = among
    path.write_text(json.dumps(config))
    length = 60  # within every original length
    checkpoint = Checkpoint(folder)
    rope = registry.decoder_config(checkpoint).rope
    cos, sin = rope_table(rope, length, torch.float32)
    reference = load_reference(folder).model.rotary_emb
    expected = reference(torch.zeros(1), torch.arange(length)[None])
    half = rope.size // 2
    torch.testing.assert_close(cos[:, 0], expected[0][0])
    torch.testing.assert_close(sin[:, 0, half:], expected[1][0, :, half:])
