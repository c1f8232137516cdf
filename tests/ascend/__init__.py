"""Tests of what runs on Ascend NPUs, with the real torch_npu over a simulated device."""
