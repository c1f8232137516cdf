"""The family of a model with images that has no record: transformers' own code, found by the names in config.json."""

from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family, ItemSize
from services.families.generic import is_listed
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality

# Parts of config.json that describe an encoder of images.
_VISION = ("vision_config", "vq_config")


def family_of(checkpoint: Checkpoint) -> Family | None:
    """The family of an architecture of transformers with images; None for a model without, and for others."""
    architecture = checkpoint.architecture
    takes_images = any(isinstance(checkpoint.config.get(part), dict) for part in _VISION)
    if not takes_images or not is_listed(architecture):
        return None
    return Family(
        (architecture,),
        prompt=GENERIC_PROMPT,
        encoder=GENERIC_ENCODER,
        sizes="services.families.generic_media:largest",
    )


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`. A picture of ordinary size; its tokens are 0 where only the processor's code knows them."""
    config, images = checkpoint.config, checkpoint.image_processor_config
    # Gemma's; one token more before and behind them.
    rows = int(config.get("mm_tokens_per_image") or 0)
    known = rows and not images.get("do_pan_and_scan")
    return ItemSize(1024, 1024, tokens=rows + 2 if known else 0)
