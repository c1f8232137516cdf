"""Models that have no decoder here: the code of transformers runs them, over our cache.

What config.json says is refused here. The decoder compares everything else with the model's own forward when it starts.
"""

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from services.families.family import Family
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.model_config.decoder import TextSizes, read_whole, refuse_quantization

GENERIC = Family(
    architectures=(),
    decoder="services.decoder.models.generic.decoder:GenericDecoder",
    config="services.families.generic:read",
)

_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Values of `layer_types` that are served.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Keys of configurations, by what they tell of a model.
_RECURRENT = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "mamba_expand",
    "attention_hidden_size",
    "lru_width",
)
# Activations of transformers that no decoder here has.
OTHER_ACTIVATIONS = {
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu",
    "relu2", "relu6", "sigmoid", "sqrtsoftplus", "tanh", "hardswish", "xielu",
}  # fmt: skip
_SIZES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"
    ),
}  # fmt: skip


def read(checkpoint: Checkpoint) -> TextSizes:
    """Sizes as config.json names them, 0 for what it leaves out.

    Raises InvalidRequest for a model that transformers' code cannot run here.
    """
    refuse_quantization(checkpoint, ModelBackend.TRANSFORMERS)
    reason = _reason(checkpoint)
    if reason:
        raise unsupported(checkpoint, reason)
    text = checkpoint.text_config
    sizes = {
        name: next((read_whole(checkpoint, key, text[key]) for key in keys if text.get(key)), 0)
        for name, keys in _SIZES.items()
    }
    if sizes["vocab_size"]:  # tokens that have an embedding and no output are counted
        sizes["vocab_size"] += int(text.get("additional_vocab_size") or 0)
    return TextSizes(**sizes)


def require_length(max_model_len: int) -> int:
    """The length itself. Raises InvalidRequest for 0, which stands for one that config.json does not say."""
    if not max_model_len:
        raise InvalidRequest(
            "UNKNOWN_LENGTH",
            "config.json does not say how long a text may be: give --max-model-len",
            field="max_model_len",
        )
    return max_model_len


def require_trusted(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Raises InvalidRequest for a model whose class comes with the checkpoint, unless it is trusted."""
    if _is_remote(checkpoint) and not trust_remote_code:
        raise InvalidRequest(
            "REMOTE_CODE",
            f"{checkpoint.folder}: {checkpoint.architecture} is code of the checkpoint itself: read it, then give"
            " --trust-remote-code to run it",
            field="trust_remote_code",
        )


def has_other_activation(checkpoint: Checkpoint, text_type: str) -> bool:
    """Whether transformers has a class for this model, and it an activation that decoders here lack."""
    return (
        checkpoint.text_config.get("hidden_act") in OTHER_ACTIVATIONS
        and is_listed(checkpoint.architecture)
        and is_listed(text_type)
    )


def _is_remote(checkpoint: Checkpoint) -> bool:
    return "auto_map" in checkpoint.config and not is_listed(checkpoint.architecture)


def is_listed(name: str) -> bool:
    """Whether transformers has a model type or a class of this name; where it is not installed it is taken to."""
    known = _known_names()
    return not known or f'"{name}"' in known


@cache
def _known_names() -> str:
    """The text in which transformers lists its types and classes, "" where it is not installed. Importing it would take
    seconds."""
    library = importlib.util.find_spec("transformers")
    if library is None or library.origin is None:
        return ""
    folder = Path(library.origin).parent / "models" / "auto"
    files = [
        folder / f"{name}.py" for name in ("modeling_auto", "configuration_auto", "auto_mappings")
    ]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _reason(checkpoint: Checkpoint) -> str:
    """Why a model cannot be served; nothing where config.json does not say."""
    return (
        _other_kind(checkpoint)
        or _other_layers(checkpoint.text_config)
        or _unknown_name(checkpoint)
    )


def _other_kind(checkpoint: Checkpoint) -> str:
    configs = (checkpoint.config, checkpoint.text_config)
    if not checkpoint.architecture.endswith(_GENERATES):
        return "it is no model that generates text"
    if any("type_vocab_size" in config and not config.get("is_decoder") for config in configs):
        return "it is an encoder"
    if any(config.get("is_encoder_decoder") for config in configs):
        return "it has an encoder and a decoder (seq2seq)"
    if any("encoder_layers" in config for config in configs):
        return "it is the decoder of a seq2seq model"
    return ""


def _other_layers(text: Mapping[str, Any]) -> str:
    kinds = text.get("layer_types")
    if kinds is not None:
        others = sorted(set(kinds) - ATTENTION_LAYERS)
        return f"it has layers of {', '.join(others)}" if others else ""
    if text.get("cross_attention_layers"):
        return "it has layers that attend to an encoder (cross_attention_layers in config.json)"
    found = [key for key in _RECURRENT if key in text]
    return f"it has recurrent layers ({', '.join(found)} in config.json)" if found else ""


def _unknown_name(checkpoint: Checkpoint) -> str:
    if "auto_map" in checkpoint.config:
        return ""
    if not is_listed(checkpoint.architecture):
        return "the transformers that is installed has no such class"
    kind = str(checkpoint.text_config.get("model_type", ""))
    if kind and not is_listed(kind):
        return f"neither Tessera nor the transformers that is installed has the text model {kind!r}"
    return ""
