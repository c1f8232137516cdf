"""Tessera's own kernels for CPUs, in C++: `source/kernels.cpp` and its headers, how they are compiled and called."""
