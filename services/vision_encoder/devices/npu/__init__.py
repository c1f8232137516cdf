"""Ascend NPUs: towers by the fused operators of torch_npu, which nothing else in this service imports."""
