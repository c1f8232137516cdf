"""The CUDA device."""
