"""Quantized checkpoints of all families whose decoders are ours, against the same weights as numbers."""

from pathlib import Path

import pytest
import torch

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.decoder_model import DecoderModel
from services.families import registry
from services.families.check import Parts, require_servable
from services.families.family import load_part
from tests.decoder.ranks.test_shares import LONGEST, Answer
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.coded import Coded, write_coded

WAYS = [
    Coded("awq"),
    Coded("gptq", symmetric=True, ordered=True),
    pytest.param(Coded("pack-quantized"), marks=pytest.mark.full),
    pytest.param(Coded("int-quantized", bits=8, group=0, symmetric=True), marks=pytest.mark.full),
]
# And how many layers each block has.
FAMILIES = {
    **dict.fromkeys(("qwen2", "qwen3", "mistral", "llava", "qwen2_vl", "qwen2_5_vl"), 7),
    "glm4": 6,
    "internlm2": 5,
    "qwen": 5,
    "chatglm": 4,
}


def answer(folder: Path) -> tuple[DecoderModel, torch.Tensor]:
    checkpoint = require_servable(folder, parts=Parts.WEIGHTS, device="cpu")
    ops = BaseOps(torch.device("cpu"), torch.float32)
    model = load_part(registry.find_decoder(checkpoint).decoder).load(checkpoint, ops, LONGEST)
    return model, Answer(model, ops).logits


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_of_a_family_are_its_numbers(tmp_path: Path, family: str, how: Coded) -> None:
    dense = make_checkpoint(tmp_path / "dense", family)
    layers = write_coded(tmp_path / "coded", dense, how)
    with torch.inference_mode():
        model, logits = answer(tmp_path / "coded")
        _, expected = answer(dense)
    assert len(layers) == FAMILIES[family] * model.config.num_layers
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
