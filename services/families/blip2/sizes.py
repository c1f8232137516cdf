"""What config.json says of BLIP-2's pictures: all have one size and as many rows."""

from dataclasses import dataclass

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from tessera.common.v1.media_pb2 import Modality

_SEQ2SEQ = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus")


@dataclass(frozen=True)
class PictureConfig:
    """`image_size`: edge in pixels; `rows` of a picture; `token`: the id that stands for each."""

    image_size: int
    rows: int
    token: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "PictureConfig":
        """Raises InvalidRequest for a text model with an encoder, and where no token stands for rows."""
        config = checkpoint.config
        kind = checkpoint.text_config.get("model_type")
        if kind in _SEQ2SEQ or config.get("use_decoder_only_language_model") is False:
            raise unsupported(checkpoint, f"its text model {kind} has an encoder (seq2seq)")
        token = config.get("image_token_index")
        if token is None:
            raise unsupported(checkpoint, "config.json has no image_token_index")
        side = (checkpoint.vision_config or {}).get("image_size", 224)
        return cls(int(side), int(config.get("num_query_tokens", 32)), int(token))


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`."""
    config = PictureConfig.read(checkpoint)
    return ItemSize(config.image_size, config.image_size, tokens=config.rows)
