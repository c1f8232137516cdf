"""`python -m services.vision_encoder.devices.npu.check`: tries the operations of towers on the NPU.

It prints a line for each, as `services.decoder.devices.npu.check` does, and ends with status 1 if one is not right.
"""

import sys
from collections.abc import Iterator

import torch
import torch_npu

from services.vision_encoder.devices.npu.check_cases import Cases
from services.vision_encoder.devices.npu.device import NpuDevice
from services.vision_encoder.devices.npu.ops import NpuOps
from shared.hardware.ascend import is_310p
from shared.hardware.operation_check import Result, print_results, try_case


def results(dtypes: tuple[torch.dtype, ...]) -> Iterator[Result]:
    """Everything, in every element type."""
    for dtype in dtypes:
        ops = NpuDevice(dtype).ops
        assert isinstance(ops, NpuOps)
        kind = str(dtype).removeprefix("torch.")
        for case in Cases(ops):
            yield try_case(case, kind, torch_npu.npu.synchronize, _first_line)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def main() -> int:
    """Prints a line for each result as it comes."""
    dtypes = (torch.float16,) if is_310p() else (torch.float16, torch.bfloat16)
    with torch.inference_mode():
        return print_results(results(dtypes))


if __name__ == "__main__":
    sys.exit(main())
