"""Devices that towers compute on, by the names of `shared.hardware.devices`."""

import importlib

from services.vision_encoder.devices.base.device import Device

# Module and class; a device's libraries are imported only where it is used.
_DEVICES = {
    "cpu": ("services.vision_encoder.devices.cpu.device", "CpuDevice"),
    "cuda": ("services.vision_encoder.devices.cuda.device", "CudaDevice"),
    "npu": ("services.vision_encoder.devices.npu.device", "NpuDevice"),
}


def device_class(name: str) -> type[Device]:
    """The class of a resolved device (`shared.hardware.torch_device`)."""
    module, attribute = _DEVICES[name]
    found: type[Device] = getattr(importlib.import_module(module), attribute)
    return found
