"""Kernels in Triton's language, which is compiled when they are first called."""
