"""The family of a model with images that has no record: transformers' own code, found by the names in config.json.

Nothing of transformers is imported here, whose services alone have it; where it is installed, its table of classes is
read as text.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family, ItemSize
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

_TABLE = "models/auto/modeling_auto.py"
# Parts of config.json that describe an encoder of images.
_VISION = ("vision_config", "vq_config")


def family_of(checkpoint: Checkpoint) -> Family | None:
    """The family of an architecture of transformers with images; None for a model without, and for others.

    Where transformers is not installed it is taken to have any.
    """
    architecture = checkpoint.architecture
    takes_images = any(isinstance(checkpoint.config.get(part), dict) for part in _VISION)
    if not takes_images or f'"{architecture}"' not in _class_table(architecture):
        return None
    return Family(
        (architecture,),
        prompt=GENERIC_PROMPT,
        encoder=GENERIC_ENCODER,
        sizes="services.families.generic_media:largest",
    )


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`. Only the processor's code knows it: a picture of ordinary size, its tokens left open."""
    return ItemSize(1024, 1024)


@cache
def _class_table(architecture: str) -> str:
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return f'"{architecture}"'
    return (Path(package.origin).parent / _TABLE).read_text(encoding="utf-8")
