"""How weights are packed on an NPU: quantized ones where they are to be numbers, and others in tiles."""

import pytest
import torch
import torch_npu

from services.decoder.devices.base.adapters import LinearPlace
from services.decoder.devices.base.device import WeightLayout
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.weights import tiled_weights
from shared.weights.linear_weight import in_memory
from tests.ascend.environment import npu_environment
from tests.ascend.support import largest_difference, random, run_python
from tests.support.decoder.packs import require_equal_packs, require_packs_ask


def test_each_pack_asks_and_packs_what_the_codes_mean() -> None:
    """Where no form is right they are what they mean (`test_codes.py` has the others)."""
    require_packs_ask(NpuDevice(torch.float16).ops)
    require_equal_packs(NpuDevice(torch.float16, forms="reference").ops)


def test_a_310p_packs_them_in_tiles() -> None:
    program = "; ".join(
        (
            "import torch",
            "from services.decoder.devices.npu.device import NpuDevice",
            "from tests.support.decoder.packs import require_equal_packs, require_packs_ask",
            "ops = NpuDevice(torch.float16).ops",
            "assert ops.name == 'npu-310p'",
            "require_packs_ask(ops)",
            "require_equal_packs(NpuDevice(torch.float16, forms='reference').ops)",
        )
    )
    run_python(program, npu_environment("310P3"))


NZ = 29
SHAPES = ((64, 48), (48, 33), (16, 64))  # outputs, inputs: the last two fill no tiles, or just one


def layouts(weights: WeightLayout, forms: str = "") -> list[bool]:
    """Which weights lie in tiles; checks that products are those of rows."""
    ops = NpuDevice(torch.float16, weights=weights, forms=forms).ops
    found = []
    for out, inputs in SHAPES:
        weight, x = random(out, inputs, seed=1), random(5, inputs)
        packed = ops.pack(in_memory(weight))
        product = ops.linear(x.to("npu"), packed)
        assert largest_difference(product, x.float() @ weight.float().T) < 0.05
        found.append(torch_npu.get_npu_format(packed.weight) == NZ)
    head = ops.pack_head(in_memory(random(64, 48)))
    place = LinearPlace("down_proj", "down", 0, 64, 48)
    addition = ops.pack_addition(place, in_memory(random(32, 48)), in_memory(random(64, 32)))
    for packed in (head, addition.down, addition.up):
        assert torch_npu.get_npu_format(packed.weight) != NZ
    return found


@pytest.fixture
def _nothing_is_known(tmp_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("_nothing_is_known")
def test_weights_lie_in_tiles_where_that_is_asked_for_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert layouts("nd") == [False] * 3
    assert layouts("nz") == [True, False, False]
    assert layouts("nz", "-weights_nz") == [False] * 3
    cast = torch_npu.npu_format_cast
    monkeypatch.setattr(torch_npu, "npu_format_cast", lambda x, kind: cast(x * 2, kind))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # nothing is kept
    assert layouts("nz") == [False] * 3


@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.usefixtures("_nothing_is_known")
def test_weights_lie_in_tiles_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    times = iter([1.0, 2.0] * 2 if is_faster else [2.0, 1.0] * 2)  # for each of two numbers of rows
    monkeypatch.setattr(tiled_weights, "_seconds", lambda *_: next(times))
    assert layouts("auto") == [is_faster, False, False]


def test_tiles_take_no_more_memory_than_rows() -> None:
    weight = torch.zeros((64, 48), dtype=torch.float16, device="npu")
    taken, kept = [torch_npu.npu.memory_allocated()], []
    for make in (torch.clone, tiled_weights.tiled):
        kept.append(make(weight))
        taken.append(torch_npu.npu.memory_allocated())
    assert taken[2] - taken[1] == taken[1] - taken[0] > 0
