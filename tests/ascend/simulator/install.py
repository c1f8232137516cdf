"""Puts the kernels of the simulator under the torch_npu of this process; importing this module is enough."""

from tests.ascend.simulator import kernels, torch_ops

torch_ops.install()
torch_ops.install_fallbacks()
kernels.refused.install()
