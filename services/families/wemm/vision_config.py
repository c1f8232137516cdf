"""What config.json says of WeMM's tower, downsampler and separators."""

from dataclasses import dataclass
from typing import Any

from services.families.wemm.sizes import JOINED
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.llava import ACTIVATIONS, TowerConfig

# What transformers takes for keys of Idefics2's tower that config.json leaves out.
_TOWER: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_DOWNSAMPLER: dict[str, Any] = {
    "kernel_size": 1,
    "stride": 1,
    "visual_hidden_size": 4096,
    "llm_hidden_size": 4096,
    "depth": 2,
    "hidden_act": "gelu",
    "bias": False,
}


@dataclass(frozen=True)
class Downsampling:
    """`inputs`, `width`: of the tower and of the language model; `depth`: linear layers, the convolution included."""

    inputs: int
    width: int
    depth: int
    activation: str
    bias: bool


@dataclass(frozen=True)
class WeMMVisionConfig:
    """`separators`: how many there are, and their width."""

    tower: TowerConfig
    downsampling: Downsampling
    separators: tuple[int, int]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "WeMMVisionConfig":
        """Raises InvalidRequest for activations that are not known, and for a downsampler that does not join JOINED
        patches of an edge."""
        given = {**_TOWER, **(checkpoint.vision_config or {})}
        down = {**_DOWNSAMPLER, **checkpoint.config["downsampler_config"]}
        asked = {
            "vision_config.hidden_act": given["hidden_act"] in ACTIVATIONS,
            "downsampler_config.hidden_act": down["hidden_act"] in ACTIVATIONS,
            **{
                f"downsampler_config.{key}": down[key] == JOINED
                for key in ("kernel_size", "stride")
            },
        }
        if wrong := [key for key, served in asked.items() if not served]:
            value = {**given, **down}[wrong[0].split(".")[1]]
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"{checkpoint.folder}: {wrong[0]} {value!r} is not served",
                field="model",
            )
        table = checkpoint.config["spliter_emb_config"]
        return cls(
            TowerConfig(
                is_clip=False,
                hidden_size=int(given["hidden_size"]),
                intermediate_size=int(given["intermediate_size"]),
                num_layers=int(given["num_hidden_layers"]),
                num_heads=int(given["num_attention_heads"]),
                num_channels=int(given["num_channels"]),
                image_size=int(given["image_size"]),
                patch_size=int(given["patch_size"]),
                activation=str(given["hidden_act"]),
                eps=float(given["layer_norm_eps"]),
            ),
            Downsampling(
                inputs=int(down["visual_hidden_size"]),
                width=int(down["llm_hidden_size"]),
                depth=int(down["depth"]),
                activation=str(down["hidden_act"]),
                bias=bool(down["bias"]),
            ),
            (int(table["num_embeddings"]), int(table["embedding_dim"])),
        )
