"""The CPU device's own kernels, in C++: `kernels.cpp` and its headers, how they are compiled and called."""
