"""Ops for Ascend 910B and later."""

from services.decoder.devices.base.ops import BaseOps


class NpuOps(BaseOps):
    """torch's own kernels, as torch_npu has them."""

    name = "npu"
