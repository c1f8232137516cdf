"""Devices that a decoder computes on, by the names of `shared.hardware.devices`."""

import importlib

from services.decoder.devices.base.device import Device

# Module and class; a device's libraries are imported only where it is used.
_DEVICES = {
    "cpu": ("services.decoder.devices.cpu.device", "CpuDevice"),
    "cuda": ("services.decoder.devices.cuda.device", "CudaDevice"),
    "npu": ("services.decoder.devices.npu.device", "NpuDevice"),
}


def device_class(name: str) -> type[Device]:
    """The class of a resolved device (`shared.hardware.torch_device`)."""
    module, attribute = _DEVICES[name]
    found: type[Device] = getattr(importlib.import_module(module), attribute)
    return found
