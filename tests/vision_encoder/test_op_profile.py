"""The profile of a tower's ops: it sees each of them, and changes no row."""

from pathlib import Path

import pytest
import torch

from services.families.family import ItemSize
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.devices.op_profile import profile_ops
from services.vision_encoder.loading import load_encoder
from shared.checkpoint.folder import Checkpoint
from tests.support.checkpoints import make_checkpoint


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_every_op_of_a_tower_is_counted(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, family))
    plain = load_encoder(checkpoint, CpuDevice(torch.float32))
    device = CpuDevice(torch.float32)
    model = load_encoder(checkpoint, device)
    assert plain is not None and model is not None
    item = model.sample(ItemSize(56, 56))
    profile = profile_ops(device)
    assert torch.equal(model.encode([item])[0], plain.encode([item])[0])
    assert profile.totals.keys() == {"linear", "norm", "add_norm", "attention"}
    layers = profile.totals["attention"].calls
    norms = profile.totals["add_norm"].calls + profile.totals["norm"].calls
    assert norms >= 2 * layers
    assert profile.totals["linear"].calls >= 4 * layers
    assert all(total.seconds > 0 and total.nbytes > 0 for total in profile.totals.values())
