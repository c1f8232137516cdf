"""Ascend NPUs, by torch_npu, which nothing else in the decoder imports."""
