"""Towers of every native family on the simulated NPU: the embeddings of the CPU, and how often the host waits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from services.families.family import ItemSize
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.devices.base.ops import TowerOps
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.devices.npu.device import NpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Encoder, Item, pixel_item
from shared.artifacts.pixel_scaling import PixelScaling
from shared.checkpoint.folder import Checkpoint
from shared.hardware.ascend import is_310p
from tests.ascend.environment import npu_environment
from tests.ascend.simulator import counters
from tests.ascend.support import run_python
from tests.reference_models import deepseek_vl2, molmo, qwen_vl, wemm, xcomposer2
from tests.support.checkpoints import make_checkpoint

Maker = Callable[[Path], Path]

# Head sizes: 72, as SigLIP's, 80, as Qwen2-VL's, and the small ones of tests.
FAMILIES: dict[str, Maker] = {
    "wemm": lambda path: wemm.write_checkpoint(path, vision={"hidden_size": 288}),
    "wemm, stock": lambda path: wemm.write_checkpoint(path, stock=True, depth=3),
    "xcomposer2": xcomposer2.write_checkpoint,
    "xcomposer2, 4khd": partial(xcomposer2.write_checkpoint, high_resolution=True, hd_num=2),
    "deepseek_vl2": deepseek_vl2.write_checkpoint,
    "molmo": molmo.write_checkpoint,
    "qwen_vl": qwen_vl.write_checkpoint,
    **{
        name: partial(make_checkpoint, family=name)
        for name in ("fuyu", "internvl_chat", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl")
    },
    # With an eps that shows beside the values.
    "internvl_chat, head norms": partial(
        make_checkpoint,
        family="internvl_chat",
        vision={"use_qk_norm": True, "layer_norm_eps": 0.5},
    ),
}
SIZES = [(150, 100), (100, 200)]
SCALING = PixelScaling(1 / 255, (0.48, 0.45, 0.41), (0.27, 0.26, 0.28))
MOST_SYNCHRONISATIONS = 3  # of a batch; the copy of all rows to the host is one
FUSED = "_npu_flash_attention_unpad" if is_310p() else "npu_fused_infer_attention_score"
WITHOUT_ATTENTION = ("fuyu",)
DTYPES = [torch.float16] if is_310p() else [torch.float16, torch.bfloat16]


# Those that take long, and of most families the second type, are left to the full run, but on a 310P, whose are chosen.
LONG = ("molmo", "xcomposer2, 4khd")
IN_BOTH_TYPES = ("wemm", "qwen2_5_vl")
CASES = [
    pytest.param(
        family,
        dtype,
        id=f"{family}-{dtype}",
        marks=()
        if is_310p() or (family not in LONG and (family in IN_BOTH_TYPES or dtype == torch.float16))
        else pytest.mark.full,
    )
    for family in FAMILIES
    for dtype in DTYPES
]


class PlainCpu(CpuDevice):
    """The CPU without kernels: the rounding of an element type, and of nothing else."""

    def _make_ops(self) -> TowerOps:
        return TowerOps(self.where, self.dtype)


def load(folder: Path, device: Device) -> Encoder:
    encoder = load_encoder(Checkpoint(folder), device)
    assert encoder is not None and encoder.uses_ops
    return encoder


def items_of(encoder: Encoder, as_bytes: bool) -> list[Item]:
    """Random pictures, of two sizes where the tower takes such."""
    numbers, items = np.random.default_rng(0), []
    for size in SIZES:
        sample = encoder.sample(ItemSize(*size))
        shape = sample.pixels.shape
        pixels = numbers.integers(0, 256, shape).astype(np.uint8)
        values = pixels if as_bytes else (pixels / 128 - 1).astype(np.float32)
        scaling = SCALING if as_bytes else None
        items.append(pixel_item(values, sample.grid, sample.height, sample.width, scaling))
    return items


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_rows_are_those_of_the_cpu(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path / "model")
    expected_of, encoder = load(folder, CpuDevice(torch.float32)), load(folder, NpuDevice(dtype))
    plain = load(folder, PlainCpu(dtype))
    items = items_of(encoder, as_bytes=family not in ("molmo",))
    encoder.encode(items)  # tables that stay on the device
    counters.kernels.clear()
    with counters.counted() as cost:
        together = encoder.encode(items)
    called = dict(counters.kernels)
    assert counters.synchronisations(cost) <= MOST_SYNCHRONISATIONS, dict(cost)
    others = zip(together, expected_of.encode(items), plain.encode(items), strict=True)
    for found, expected, same_type in others:
        assert found.device.type == "cpu" and found.dtype == dtype
        errors, usual = ((rows.float() - expected).abs() for rows in (found, same_type))
        assert float(errors.mean()) < 1.2 * float(usual.mean()), "more than the type's rounding"
        assert float(errors.max()) < 2 * float(usual.max())
    attention = {name: count for name, count in called.items() if "attention" in name}
    if family not in WITHOUT_ATTENTION:
        assert FUSED in attention, "plain torch computes what the fused kernel should"
    assert len(attention) <= 2, attention  # one kind of call; molmo's and Qwen-VL's pools are plain
    assert not {"nonzero", "item", "_local_scalar_dense", "convolution", "conv2d"} & called.keys()


@pytest.mark.skipif(is_310p(), reason="run by this test on a 910B")
def test_towers_on_310p() -> None:
    """Its own operators: attention with and without rotation and windows, norms of both kinds, gates."""
    chosen = ("-k", "test_rows and (wemm or qwen2_5_vl or molmo)")
    quiet = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    arguments = [*quiet, __file__, *chosen]
    code = f"import pytest, sys\nsys.exit(int(pytest.main({arguments!r})))"
    said = run_python(code, npu_environment("310P3"))
    assert "4 passed" in said, said
