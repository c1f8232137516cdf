"""Artifacts: immutable tensors beside the messages that name them."""
