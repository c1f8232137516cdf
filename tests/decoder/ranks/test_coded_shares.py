"""Ranks that have a part of every layer as codes compute together what one process computes with all codes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.models.llama import Llama
from services.decoder.ranks.rank_group import RankGroup
from services.decoder.ranks.share import Share
from services.families.check import Parts, require_servable
from services.families.division import require_divisible
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.weights.scheme import SMALL, find_scheme
from tests.decoder.ranks.test_shares import LONGEST, Answer
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.bitsandbytes import BitsAndBytes, write_bitsandbytes
from tests.support.checkpoints.coded import Coded, write_coded
from tests.support.checkpoints.float4 import Float4, write_float4
from tests.support.decoder.instruction_sets import RUNNABLE, open_kernels
from tests.support.decoder.thread_ranks import run_ranks

# Two ranks cut at input 96 of 192 and 192 of 384: inside of groups of 64 and 192.
TEXT = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
}
WAYS = [
    Coded("awq"),
    Coded("awq", group=0),
    Coded("awq", group=192),
    Coded("gptq", group=64),
    Coded("gptq", group=96, symmetric=True, ordered=True),
    Coded("gptq", bits=8, group=64, ordered=True),
    Coded("pack-quantized", symmetric=True, group=192),
    Coded("pack-quantized", symmetric=True, ordered=True),
    Coded("int-quantized", bits=8, group=0, symmetric=True),
]


def answer(folder: Path, quantization: str, ranks: RankGroup | None = None) -> Answer:
    ops = CpuOps(torch.float32, open_kernels(RUNNABLE[0], 1))
    ops.ranks, ops.share = ranks, Share() if ranks is None else ranks.share
    ops.scheme = find_scheme(quantization, SMALL)
    found = Answer(Llama.load(Checkpoint(folder), ops, LONGEST), ops)
    assert ops.coded_layers >= 8  # and none became numbers
    return found


def divergence(folder: Path, quantization: str, size: int = 2) -> float:
    """Of the ranks' tokens from one process's, the mean of all rows."""
    with torch.inference_mode():
        whole = answer(folder, quantization)
    parts = run_ranks(size, partial(answer, folder, quantization))
    for part in parts:
        assert torch.equal(part.logits, parts[0].logits)
    ours, theirs = (found.logits.log_softmax(-1) for found in (parts[0], whole))
    return float(
        torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1).mean()
    )


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_ranks_of_stored_codes_say_what_one_says(tmp_path: Path, how: Coded) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama", text=TEXT)
    write_coded(tmp_path / "coded", dense, how)
    checkpoint = require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    assert require_divisible(checkpoint, 2, ModelBackend.AUTO)
    # The same codes; activations of 14 bits have other steps where groups are others.
    assert divergence(tmp_path / "coded", "auto") < 1e-5


@pytest.mark.parametrize(
    ("quantization", "most"), [("int8", 0.02), ("int8g128", 0.02), ("int4g32", 0.5)]
)
def test_ranks_that_quantize_say_nearly_what_one_says(
    tmp_path: Path, quantization: str, most: float
) -> None:
    folder = make_checkpoint(tmp_path / "dense", "llama", text=TEXT)
    assert divergence(folder, quantization) < most


@pytest.mark.parametrize(
    "write",
    [
        partial(write_bitsandbytes, how=BitsAndBytes("nf4", nested=True, block=64)),
        partial(write_bitsandbytes, how=BitsAndBytes("fp4", block=192)),
        partial(write_bitsandbytes, how=BitsAndBytes("int8")),
        partial(write_float4, how=Float4("nvfp4")),
    ],
)
def test_ranks_of_codes_of_a_table_say_what_one_says(
    tmp_path: Path, write: Callable[[Path, Path], object]
) -> None:
    write(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama", text=TEXT))
    checkpoint = require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    assert require_divisible(checkpoint, 2, ModelBackend.AUTO)
    assert divergence(tmp_path / "coded", "auto") < 1e-5


@pytest.mark.parametrize(
    ("write", "tensor"),
    [
        (partial(write_coded, how=Coded("awq", group=16)), "qweight"),
        (partial(write_bitsandbytes, how=BitsAndBytes("nf4", block=16)), "weight"),
    ],
    ids=["awq", "nf4"],
)
def test_a_cut_that_no_groups_allow_is_refused_by_tensor_group_and_ranks(
    tmp_path: Path, write: Callable[[Path, Path], object], tensor: str
) -> None:
    text = {**TEXT, "head_dim": 12, "hidden_size": 96}
    write(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama", text=text))
    said = rf"size 2: .*o_proj\.{tensor} with groups of 16, whose 48 inputs are cut at 24"
    with pytest.raises(InvalidRequest, match=said):
        require_divisible(Checkpoint(tmp_path / "coded"), 2, ModelBackend.AUTO)
