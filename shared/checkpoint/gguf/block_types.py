"""The element types that tensors of GGUF files have. Standard library only.

Source: ggml, `ggml.h` and `gguf.constants.GGML_QUANT_SIZES` of the library `gguf`, with which a test compares.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """`nbytes` hold `elements` numbers that follow each other in a row."""

    name: str
    elements: int
    nbytes: int


# By the numbers that files have for them. Numbers are named as safetensors names them.
NUMBERS = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    28: BlockType("F64", 1, 8),
    30: BlockType("BF16", 1, 2),
}
CODES = {
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
TYPES = NUMBERS | CODES
# Those of codes by their names, which are the element types of tensors that have them.
CODED = {kind.name: kind for kind in CODES.values()}
