"""Sizes of Molmo's tower, pooling and projector, by the tensors of a checkpoint."""

from dataclasses import dataclass

from services.vision_encoder.weights import linear_sizes
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_checkpoint

PREFIX = "model.vision_backbone."
HEADS = 16
_AHEAD = 7  # layers between the two whose states are taken


@dataclass(frozen=True)
class MolmoVisionConfig:
    """Sizes, which config.json does not have: those of the stored tensors. `layers`: those that lead to a row."""

    values: int  # of a patch
    places: int  # the class row included
    width: int
    inner: int
    layers: int
    projected: int  # width inside of the projector
    text_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "MolmoVisionConfig":
        """Raises InvalidRequest for a checkpoint without these tensors, or whose tower is too small."""
        names, blocks = set(checkpoint.names()), "image_vit.transformer.resblocks"

        def shape(name: str) -> tuple[int, ...]:
            if PREFIX + name not in names:
                raise bad_checkpoint(checkpoint, f"the checkpoint lacks {PREFIX}{name}")
            return checkpoint.shape(PREFIX + name)

        def sizes(layer: str) -> tuple[int, ...]:
            if not any(name.startswith(f"{PREFIX}{layer}.") for name in names):
                raise bad_checkpoint(checkpoint, f"the checkpoint lacks {PREFIX}{layer}.weight")
            return linear_sizes(checkpoint, PREFIX + layer)

        width, values = sizes("image_vit.patch_embedding")
        text_size, projected = sizes("image_projector.w2")
        count = sum(f"{PREFIX}{blocks}.{i}.ffn_norm.weight" in names for i in range(len(names)))
        if count < _AHEAD + 2 or width % HEADS:
            raise bad_checkpoint(
                checkpoint, f"a tower of {count} layers, {width} wide, with {HEADS} heads"
            )
        return cls(
            values=values,
            places=shape("image_vit.positional_embedding")[0],
            width=width,
            inner=sizes(f"{blocks}.0.feed_forward.w1")[0],
            layers=count - 1,  # nothing is taken of the last one
            projected=projected,
            text_size=text_size,
        )

    @property
    def taken(self) -> tuple[int, int]:
        """Numbers of layers behind which the tower's state is taken, in the order in which they stand in a row."""
        return self.layers, self.layers - _AHEAD
