"""Puts the kernels of the simulator under the torch_npu of this process; importing this module is enough."""

from tests.ascend.simulator import external_events, graphs, kernels, runtime, torch_ops

runtime.set_hook(graphs.hook)
external_events.install()
torch_ops.install()
torch_ops.install_fallbacks()
kernels.refused.install()
