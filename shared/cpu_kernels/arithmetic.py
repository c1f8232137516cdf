"""Which arithmetic the CPU kernels compute in."""

ARITHMETIC_VERSION = 2
"""Part of what decoders and encoders say of their bits (`shared/numerics.py`).

Raise it by one with every change of the kernels, or of how they are compiled and called, that may change a bit of any
result on any instruction set: another order of sums, another approximation, another rounding, other flags for
contraction or denormals. Leave it alone for changes of speed, layout, comments or new instruction sets. Raised without
need, it costs the promise of equal text to answers that are under way during an upgrade; forgotten, an answer that two
versions have written is promised to be what one of them would have written.
"""
