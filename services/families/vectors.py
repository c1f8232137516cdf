"""Checkpoints that were saved to give vectors or scores, by the names of their architectures."""

from shared.checkpoint.folder import Checkpoint

_CLASSIFIES = "ForSequenceClassification"
_BARE = "Model"
_GENERATES = "ForCausalLM"
MODULES = "modules.json"  # of sentence-transformers


def classifies(checkpoint: Checkpoint) -> bool:
    """Whether it has a classification head in the place of the output matrix."""
    return checkpoint.kind.endswith(_CLASSIFIES)


def generating_name(architecture: str) -> str:
    """The architecture with an output matrix whose layers an architecture for vectors has; itself for any other."""
    for end in (_CLASSIFIES, _BARE):
        if architecture.endswith(end):
            return architecture.removesuffix(end) + _GENERATES
    return architecture
