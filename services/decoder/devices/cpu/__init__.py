"""The CPU device: our own kernels, or torch where they cannot be compiled."""
