"""The architectures of GGUF files that are read, by the names that files have for them."""

from collections.abc import Mapping

from shared.checkpoint.gguf.families.family import Architecture
from shared.checkpoint.gguf.families.gemma import GEMMA
from shared.checkpoint.gguf.families.layer_norms import LAYER_NORMS
from shared.checkpoint.gguf.families.llama import LLAMA
from shared.checkpoint.gguf.families.others import OTHERS

ARCHITECTURES: Mapping[str, Architecture] = {**LLAMA, **GEMMA, **OTHERS, **LAYER_NORMS}
