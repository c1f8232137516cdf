"""Tensors of the CPU over the bytes of the simulated device, whose memory is host memory."""

import ctypes

import torch
from torch import Tensor

_BYTE = ctypes.c_char


def on_device(value: object) -> bool:
    """Whether it is a tensor of the NPU."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def host_view(tensor: Tensor) -> Tensor:
    """A tensor of the CPU that shares the bytes, shape and strides of one on the device."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    content = (_BYTE * storage.nbytes()).from_address(storage.data_ptr())
    shared = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())
    made.was_on_device = True  # type: ignore[attr-defined]
    return made


def was_on_device(view: Tensor) -> bool:
    """Whether a tensor of the CPU, an argument of a kernel, is a `host_view`."""
    return getattr(view, "was_on_device", False)


def to_device(tensor: Tensor) -> Tensor:
    """A new tensor on the device with these values and strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    if tensor.numel():
        host_view(made).copy_(tensor)
    return made
