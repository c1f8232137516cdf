"""Which class runs which architecture. A new family is a file and a line here."""

import importlib

from services.decoder.models.decoder_model import DecoderModel
from shared.checkpoint import Checkpoint
from shared.errors import InvalidRequest

_MODELS = {
    "LlamaForCausalLM": ("services.decoder.models.llama", "Llama"),
    "MistralForCausalLM": ("services.decoder.models.mistral", "Mistral"),
    "Qwen2ForCausalLM": ("services.decoder.models.qwen2", "Qwen2"),
    "Qwen2VLForConditionalGeneration": ("services.decoder.models.qwen2_vl", "Qwen2VL"),
    "Qwen2_5_VLForConditionalGeneration": ("services.decoder.models.qwen2_5_vl", "Qwen2_5VL"),
    "Qwen3ForCausalLM": ("services.decoder.models.qwen3", "Qwen3"),
}
# The language part of these is a model of its own, named by text_config's model_type.
_COMPOSITES = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
_BY_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def model_class(checkpoint: Checkpoint) -> type[DecoderModel]:
    """The class for a checkpoint. Raises InvalidRequest for an architecture that is not here."""
    architecture = checkpoint.architecture
    if architecture in _COMPOSITES:
        kind = str(checkpoint.text_config.get("model_type", "llama"))
        architecture = _BY_TYPE.get(kind, f"{architecture} with text model {kind!r}")
    if architecture not in _MODELS:
        raise InvalidRequest(
            "UNKNOWN_ARCHITECTURE",
            f"{checkpoint.folder}: no decoder for {architecture}; there are"
            f" {', '.join((*_MODELS, *_COMPOSITES))}",
            field="model",
        )
    module, name = _MODELS[architecture]
    found: type[DecoderModel] = getattr(importlib.import_module(module), name)
    return found
