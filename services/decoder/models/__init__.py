"""Which class runs which family of decoders. A new family is a file and a line here."""

import importlib

from services.decoder.models.decoder_model import DecoderModel
from shared.checkpoint.folder import Checkpoint
from shared.model_config.families import decoder_family

_MODELS = {
    "llama": ("services.decoder.models.llama", "Llama"),
    "mistral": ("services.decoder.models.llama", "Llama"),
    "qwen2": ("services.decoder.models.llama", "Llama"),
    "qwen2_vl": ("services.decoder.models.qwen2_vl", "Qwen2VL"),
    "qwen2_5_vl": ("services.decoder.models.qwen2_5_vl", "Qwen2_5VL"),
    "qwen3": ("services.decoder.models.qwen3", "Qwen3"),
}


def model_class(checkpoint: Checkpoint) -> type[DecoderModel]:
    """The class for a checkpoint. Raises InvalidRequest for an architecture that is not here."""
    module, name = _MODELS[decoder_family(checkpoint)]
    found: type[DecoderModel] = getattr(importlib.import_module(module), name)
    return found
