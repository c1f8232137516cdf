"""Ascend NPUs, by torch_npu, which nothing else imports."""
