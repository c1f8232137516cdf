"""What config.json says of DeepSeek-VL2's tower and projector."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.families.deepseek_vl2.refusal import require
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option

# Of the vision part's own configuration class: what config.json may leave out.
_DEFAULTS: Mapping[str, Any] = {
    "image_size": 384,
    "patch_size": 16,
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "mlp_ratio": 4.0,
}
_TOWER = {"class_token": False, "ignore_head": True}
_PROJECTOR = {"projector_type": "downsample_mlp_gelu", "depth": 2, "token_pooling": False}


@dataclass(frozen=True)
class VisionConfig:
    """Tower and projector. `fold`: edge of the squares of patches that become one row; `width`, `inner`: of the tower
    and of its MLP; `between`: of the projector's middle."""

    image_size: int
    patch_size: int
    width: int
    heads: int
    inner: int
    layers: int
    fold: int
    between: int
    text_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "VisionConfig":
        """Raises InvalidRequest for a tower or a projector of another kind."""
        vision = {**_DEFAULTS, **(checkpoint.vision_config or {})}
        projector = checkpoint.config["projector_config"]
        name = str(vision.get("model_name", "siglip"))
        if not name.startswith("siglip"):
            raise bad_option(
                checkpoint, f"vision_config.model_name {name!r}; only SigLIP is served"
            )
        require(checkpoint, "vision_config", vision, _TOWER)
        require(checkpoint, "projector_config", projector, _PROJECTOR)
        text_size = int(checkpoint.text_config["hidden_size"])
        sizes = {"input_dim": vision["width"], "n_embed": text_size}
        require(checkpoint, "projector_config", projector, sizes)
        return cls(
            image_size=int(vision["image_size"]),
            patch_size=int(vision["patch_size"]),
            width=int(vision["width"]),
            heads=int(vision["heads"]),
            inner=int(vision["width"] * vision["mlp_ratio"]),
            layers=int(vision["layers"]),
            fold=int(projector.get("downsample_ratio", 2)),
            between=text_size * int(projector.get("mlp_ratio", 1)),
            text_size=text_size,
        )

    @property
    def side(self) -> int:
        """Patches along a tile's edge."""
        return self.image_size // self.patch_size

    @property
    def line(self) -> int:
        """Embedding rows along a tile's edge."""
        return -(-self.side // self.fold)
