"""The progress of loading a large model is logged: share, rate, and where the time goes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader


def test_progress_counts_what_this_service_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(3_000_000, dtype=torch.float32).reshape(1500, 2000),
        "b": torch.ones(4_000_000, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
        "of another service": torch.zeros(5_000_000, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with capture_logs() as lines:
        reader = WeightReader(Checkpoint(tmp_path), ["a", "b", "empty"], say_every_s=0.0)
        for name in ("a", "b", "empty"):
            assert torch.equal(reader.tensor(name), tensors[name])
        reader.finish()
    assert [line["percent"] for line in lines[:-1]] == [60, 100, 100]
    last = lines[-1]
    assert last["event"] == "loaded weights"
    assert last["gb"] == 0.02 and last["gb_per_s"] > 0
    assert last["seconds"] == pytest.approx(last["reading_s"] + last["packing_s"], abs=0.02)
