"""What config.json says of InternVL's tower and projector."""

from dataclasses import dataclass
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option

_DEFAULTS: dict[str, Any] = {
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 448,
    "hidden_size": 3200,
    "num_attention_heads": 25,
    "intermediate_size": 12_800,
    "num_hidden_layers": 48,
    "qkv_bias": False,
    "qk_normalization": True,
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
}
_NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class InternViTConfig:
    """Tower and projector. `layers`: how many lead to the state that is taken; `fold`: edge of the squares of patches
    that become one row; `swaps`: these rows are in the order of their columns (`ps_version` v1)."""

    image_size: int
    patch_size: int
    hidden_size: int
    heads: int
    inner: int
    layers: int
    qkv_bias: bool
    qk_norms: bool
    rms_norms: bool
    eps: float
    fold: int
    swaps: bool
    text_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "InternViTConfig":
        """Raises InvalidRequest for options that the tower does not have."""
        given = {**_DEFAULTS, **(checkpoint.vision_config or {})}
        config = checkpoint.config
        count = int(given["num_hidden_layers"])
        layer = int(config.get("select_layer", -1))
        taken = layer + count + 1 if layer < 0 else layer
        asked = {
            "hidden_act": given["hidden_act"] == "gelu",
            "num_channels": given["num_channels"] == 3,
            "norm_type": given["norm_type"] in _NORMS,
            "num_attention_heads": given["hidden_size"] % given["num_attention_heads"] == 0,
            "select_layer": 0 <= taken <= count,
        }
        if wrong := [key for key, served in asked.items() if not served]:
            raise bad_option(
                checkpoint,
                f"{wrong[0]} {given.get(wrong[0], layer)!r} is not served",
            )
        return cls(
            image_size=int(given["image_size"]),
            patch_size=int(given["patch_size"]),
            hidden_size=int(given["hidden_size"]),
            heads=int(given["num_attention_heads"]),
            inner=int(given["intermediate_size"]),
            layers=taken,
            qkv_bias=bool(given["qkv_bias"]),
            qk_norms=bool(given["qk_normalization"]),
            rms_norms=given["norm_type"] == "rms_norm",
            eps=float(given["layer_norm_eps"]),
            fold=round(1 / float(config.get("downsample_ratio") or 0.5)),
            swaps=config.get("ps_version", "v1") == "v1",
            text_size=int(checkpoint.text_config["hidden_size"]),
        )
