"""How many tokens a picture of Chameleon has."""

from typing import Any

from services.families.family import ItemSize
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from tessera.common.v1.media_pb2 import Modality

_MARKS = 2  # beside the codes: the tokens before and behind them
_VQ: dict[str, Any] = {"resolution": 512, "channel_multiplier": (1, 1, 2, 2, 4)}


def largest(checkpoint: Checkpoint, modality: Modality.ValueType) -> ItemSize:
    """See `Family.largest`. Raises InvalidRequest where config.json does not say which tokens pictures have."""
    vocabulary = checkpoint.config.get("vocabulary_map") or {}
    if "<image>" not in vocabulary or not any(name.startswith("IMGIMG") for name in vocabulary):
        raise unsupported(checkpoint, "vocabulary_map in config.json has no tokens of pictures")
    vq = {**_VQ, **checkpoint.config["vq_config"]}
    side = int(vq["resolution"])
    codes = (side >> (len(vq["channel_multiplier"]) - 1)) ** 2
    return ItemSize(side, side, tokens=codes + _MARKS)
