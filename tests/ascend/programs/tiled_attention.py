"""Prints, as JSON, what a 310P's attention gives by a kernel as documented and by kernels with a fault: the form that
is found, and the largest difference of a mixed step from the reference."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.attention.tiled_attention import NZ
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.forms import Asked, Choice, Form, Forms, Heads, Trial, Trials
from services.decoder.devices.npu.trials import trials
from services.decoder.steps.attention_meta import KVSpec
from tests.ascend.decoder.test_ops import Pair

Arguments = list[Any]
KEYS, MASK = 4, 5  # places among the arguments


def as_documented(given: Arguments) -> Arguments:
    """Nothing is changed."""
    return given


def with_lengths_on_the_host(given: Arguments) -> Arguments:
    """As ATB of other chips wants them."""
    if given[KEYS].device.type != "cpu":
        raise RuntimeError("contextLens: hostData is null")
    return _changed(given, KEYS, given[KEYS].npu())


def with_the_mask_of_the_next_query(given: Arguments) -> Arguments:
    """Rows are counted otherwise than they were made."""
    mask = torch_npu.npu_format_cast(given[MASK].roll(1, 2), NZ)
    return _changed(given, MASK, mask)


def without_a_mask(given: Arguments) -> Arguments:
    """Every query sees all keys."""
    mask = torch_npu.npu_format_cast(torch.zeros_like(given[MASK]), NZ)
    return _changed(given, MASK, mask)


def _changed(given: Arguments, place: int, value: Tensor) -> Arguments:
    return [*given[:place], value, *given[place + 1 :]]


KERNELS: list[Callable[[Arguments], Arguments]] = [
    as_documented,
    with_lengths_on_the_host,
    with_the_mask_of_the_next_query,
    without_a_mask,
]


def main() -> None:
    """For each kernel."""
    device = NpuDevice(torch.float16)
    kernel = torch_npu._npu_paged_attention_splitfuse
    pair = Pair(device, KVSpec(2, 64, 64, torch.float16), 13)
    found = {}
    for change in KERNELS:
        torch_npu._npu_paged_attention_splitfuse = _calling(kernel, change)
        device.ops.forms = Forms(device.ops.known_forms, _tried_here(device), Choice())
        error = pair.attention(4, [1, 1, 7, 140], [1, 300, 260, 140])
        form = device.ops.forms.form(Heads(4, 2, 64))
        found[change.__name__] = [None if form is None else form.name, error]
    print(json.dumps(found))


def _tried_here(device: NpuDevice) -> Trials:
    """In this process, which has another kernel than all others."""

    def tried(asked: Asked, forms: Sequence[Form]) -> Iterator[Trial]:
        return trials.here(device.ops, [(asked, form) for form in forms])

    return tried


def _calling(kernel: Any, change: Callable[[Arguments], Arguments]) -> Callable[..., None]:
    def call(*given: Any) -> None:
        kernel(*change(list(given)))

    return call


if __name__ == "__main__":
    with torch.inference_mode():
        main()
