"""Whatever packs a linear layer asks whether its weight is quantized, and packs codes as it packs their numbers."""

from collections.abc import Callable

import pytest
import torch

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.use import Use
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.devices.cpu.torch_ops import TorchCpuOps
from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.steps.attention_meta import Packed
from shared.cpu_kernels.instruction_sets import InstructionSet
from shared.weights.linear_weight import Codes, LinearWeight, as_codes
from tests.support.decoder.coded_weights import Form
from tests.support.decoder.instruction_sets import each, open_kernels
from tests.support.decoder.packs import packs, require_equal_packs, require_packs_ask

CPU = torch.device("cpu")
Make = Callable[[torch.dtype], BaseOps]


def own(known: InstructionSet) -> Make:
    return lambda dtype: CpuOps(dtype, open_kernels(known, 2))


PLAIN: dict[type[BaseOps], Make] = {
    kind: lambda dtype, kind=kind: kind(CPU, dtype)  # type: ignore[misc]
    for kind in (BaseOps, TorchCpuOps)
}
KINDS = [pytest.param(make, id=kind.__name__) for kind, make in PLAIN.items()]
# Codes stay codes there: what they stand for is tested in `test_cuda_codes.py`.
CODED = pytest.param(lambda dtype: CudaOps(CPU, dtype), id="CudaOps")


@pytest.mark.parametrize("make", [*KINDS, CODED, *each(own)])
def test_each_pack_asks(make: Make) -> None:
    require_packs_ask(make(torch.float32))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_pack_without_kernels_for_codes_packs_what_they_mean(
    make: Make, dtype: torch.dtype
) -> None:
    require_equal_packs(make(dtype))


class _Codes(BaseOps):
    """A device that multiplies by codes of 8 bits."""

    def __init__(self) -> None:
        super().__init__(CPU, torch.float32)
        self.seen: list[tuple[int, Use]] = []

    def _pack_codes(self, weight: LinearWeight, codes: Codes, use: Use) -> Packed | None:
        found = codes(None)
        self.seen.append((found.bits, use))
        return Packed(found.codes, weight.bias) if found.bits == 8 else None


def test_a_device_says_in_one_place_which_codes_it_multiplies_by() -> None:
    ops = _Codes()
    eight, four = Form(group=32).make(32, 64), Form(bits=4, group=32).make(32, 64)
    for pack in packs(ops).values():
        assert torch.equal(pack(as_codes(eight)).weight, eight.codes)
        assert torch.equal(pack(as_codes(four)).weight, four.dequantize(torch.float32))
    assert {use for _, use in ops.seen} == set(Use)
    with pytest.raises(AssertionError, match=r"_Forgetful\.pack_new does not ask"):
        require_packs_ask(_Forgetful())


class _Forgetful(BaseOps):
    def __init__(self) -> None:
        super().__init__(CPU, torch.float32)

    def pack_new(self, weight: object) -> None:
        """Does not ask."""
