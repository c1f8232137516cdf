"""Tests of the simulated NPU itself, as torch_npu sees it."""
