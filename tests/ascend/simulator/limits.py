"""What every kernel of the device asks of its arguments."""

import math
from collections.abc import Iterable

import torch
import torch_npu
from torch import Tensor

from tests.ascend.simulator.errors import Refused
from tests.ascend.simulator.personality import personality

_MOST_DIMENSIONS = 8
_NZ, _NZ_ROW = 29, 16
# Tensors of the CPU that these take as host values: lengths, masks of indices that torch_npu copies by itself.
_TAKE_HOST_TENSORS = frozenset(
    {
        "copy_",
        "index",
        "index_put_",
        "_index_put_impl_",
        "_npu_flash_attention",
        "_npu_flash_attention_unpad",
        "_npu_paged_attention",
        "_npu_paged_attention_splitfuse",
    }
)
# These see by the format how caches and masks lie, and take no others of four dimensions on a 310P.
_TAKE_TILES = frozenset(
    {"_npu_reshape_and_cache", "_npu_paged_attention", "_npu_paged_attention_splitfuse"}
)
# Memory is moved or filled, nothing is computed.
_TAKE_ANY_DTYPE = frozenset({"copy_", "fill_", "zero_", "zeros", "full", "_to_copy", "clone"})


def check(name: str, tensors: Iterable[Tensor]) -> None:
    """Raises Refused for what no kernel takes, or not on this device."""
    here = personality()
    if name in here.unsupported:
        raise Refused(f"{name} is not supported on {here.soc}")
    for tensor in tensors:
        if tensor.device.type != "npu":
            _check_host(name, tensor)
            continue
        if tensor.dim() > _MOST_DIMENSIONS:
            raise Refused(f"{name}: {tensor.dim()} dimensions, the NPU takes at most 8")
        if here.is_310p:
            _check_layout(name, tensor)
        if tensor.dtype == torch.bfloat16 and not here.has_bfloat16 and name not in _TAKE_ANY_DTYPE:
            raise Refused(
                f"call aclnn{name} failed: self not implemented for DT_BFLOAT16, should be in dtype support list "
                f"[DT_FLOAT,DT_FLOAT16] ({here.soc})"
            )


def _check_layout(name: str, tensor: Tensor) -> None:
    """A part of a tensor in NZ is not where its strides say. Rows of 16 elements are the same bytes in both layouts."""
    if name in _TAKE_TILES and tensor.dim() == 4 and torch_npu.get_npu_format(tensor) != _NZ:
        raise Refused(f"{name}: a tensor {list(tensor.shape)} that is not in FRACTAL_NZ")
    if torch_npu.get_npu_format(tensor) != _NZ or tensor.shape[-1:] == (_NZ_ROW,):
        return
    sizes = [-(-size // _NZ_ROW) * _NZ_ROW for size in tensor.shape[-2:]]
    whole = math.prod((*tensor.shape[:-2], *sizes)) == torch_npu.get_storage_size(tensor)
    if tensor.dim() < 2 or tensor.storage_offset() or not whole:
        raise Refused(f"{name}: a view of shape {list(tensor.shape)} of a tensor in FRACTAL_NZ")


def _check_host(name: str, tensor: Tensor) -> None:
    if tensor.dim() and name not in _TAKE_HOST_TENSORS:
        raise Refused(
            f"{name}: Expected all tensors to be on the same device, but found at least two devices, npu:0 and "
            f"cpu! (a tensor of shape {list(tensor.shape)})"
        )
