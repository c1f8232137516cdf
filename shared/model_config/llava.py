"""What config.json says of LLaVA's vision part, read without transformers, whose modules take seconds to import."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_COMMON = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
# model_type -> what transformers takes for keys that config.json leaves out.
_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {
        **_COMMON,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        **_COMMON,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
# The tower of a checkpoint that describes none.
_NO_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_TEXT_HIDDEN_SIZE = 4096
# By transformers' names.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")


@dataclass(frozen=True)
class TowerConfig:
    """A CLIP or SigLIP tower. Sizes of squares and patches are edges in pixels."""

    is_clip: bool  # it has a class token, and a norm before its layers
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    activation: str
    eps: float


@dataclass(frozen=True)
class LlavaConfig:
    """Tower and projector.

    `layers`: the hidden states that the projector takes, counted from the front, 0 being what enters the first layer;
    `text_size`: width of the language model; `drops_first`: the first row of each state is left out.
    """

    tower: TowerConfig
    layers: tuple[int, ...]
    drops_first: bool
    text_size: int
    projector_activation: str
    projector_bias: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "LlavaConfig":
        """Raises InvalidRequest for a tower or activation that is not known, and for layers that are not there."""
        config = checkpoint.config
        tower = _read_tower(checkpoint.vision_config or _NO_TOWER)
        return cls(
            tower,
            _hidden_states(config.get("vision_feature_layer", -2), tower.num_layers),
            drops_first=config.get("vision_feature_select_strategy", "default") == "default",
            text_size=int(checkpoint.text_config.get("hidden_size") or _TEXT_HIDDEN_SIZE),
            projector_activation=_activation(config.get("projector_hidden_act", "gelu")),
            projector_bias=bool(config.get("multimodal_projector_bias", True)),
        )


def _read_tower(config: Mapping[str, Any]) -> TowerConfig:
    kind = config.get("model_type", "clip_vision_model")
    if kind not in _TOWERS:
        raise _bad(
            "UNSUPPORTED_CONFIG",
            f"LLaVA with a {kind} tower is not supported; {', '.join(_TOWERS)} are",
        )
    given = {**_TOWERS[kind], **config}
    return TowerConfig(
        is_clip=kind == "clip_vision_model",
        hidden_size=int(given["hidden_size"]),
        intermediate_size=int(given["intermediate_size"]),
        num_layers=int(given["num_hidden_layers"]),
        num_heads=int(given["num_attention_heads"]),
        num_channels=int(given["num_channels"]),
        image_size=int(given["image_size"]),
        patch_size=int(given["patch_size"]),
        activation=_activation(given["hidden_act"]),
        eps=float(given["layer_norm_eps"]),
    )


def _hidden_states(layer: Any, count: int) -> tuple[int, ...]:
    """Indices of the hidden states to take, counted from the front."""
    wanted = [layer] if isinstance(layer, int) else list(layer)
    found = tuple(index + count + 1 if index < 0 else index for index in wanted)
    if not found or not all(0 <= index <= count for index in found):
        raise _bad(
            "BAD_CHECKPOINT", f"vision_feature_layer {layer} is outside the tower's {count} layers"
        )
    return found


def _activation(name: Any) -> str:
    if name not in ACTIVATIONS:
        raise _bad(
            "UNSUPPORTED_CONFIG",
            f"LLaVA with the activation {name} is not supported; {', '.join(ACTIVATIONS)} are",
        )
    return str(name)


def _bad(reason: str, what: str) -> InvalidRequest:
    return InvalidRequest(reason, f"config.json: {what}", field="model")
