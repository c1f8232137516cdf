"""CUDA devices: torch's own kernels, transfers by pinned memory."""
