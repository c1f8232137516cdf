"""The simulated NPU: kernels in Python under the real torch_npu, over the runtime of `tests/ascend/runtime`."""
