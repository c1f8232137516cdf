"""GLM-4-0414's decoder as config.json describes it."""

from services.families.glm.config import BIASES, DEFAULTS
from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """Raises InvalidRequest as `read_config` does."""
    return read_config(checkpoint, {**DEFAULTS, "post_norms": True}, BIASES)
