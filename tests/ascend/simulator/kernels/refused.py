"""Custom ops that nobody has written a kernel for: called, they would leave their output as it was allocated."""

from typing import Any

import torch

from tests.ascend.simulator import dispatch
from tests.ascend.simulator.errors import Refused

# These allocate, or read what torch_npu knows of a tensor.
_OWN = (
    "get_npu_format",
    "get_storage_size",
    "npu_change_data_ptr",
    "copy_memory_",
    "_npu_dtype_cast",
)


def install() -> None:
    """Makes every custom op without a kernel say so."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace not in ("npu", "atb") or name in _OWN or "empty_with" in name:
            continue
        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        if not dispatch.is_registered(namespace, full) and _has_device_kernel(
            f"{namespace}::{full}"
        ):
            dispatch.register(namespace, full, _refusal(name))


def _has_device_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"))


def _refusal(name: str) -> dispatch.Kernel:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise Refused(f"{name} has no kernel in the simulator (tests/ascend/simulator/kernels)")

    return refuse
