"""The simulated Ascend runtime, in C++, and what builds it."""
