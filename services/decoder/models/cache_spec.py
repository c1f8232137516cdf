"""What a model keeps of its sequences in all, and what that takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.layer_spec import EncoderKeys, LayerSpec, Paged, State
from shared.errors import InvalidRequest


@dataclass(frozen=True)
class CacheSpec:
    """The kinds of cache, each with its layers in the order of the model's: keys and values in blocks, state that
    each sequence has in its slot, and keys and values of what an encoder made of media."""

    paged: tuple[Paged, ...]
    states: tuple[State, ...]
    encoder: tuple[EncoderKeys, ...] = ()

    @property
    def is_paged_alone(self) -> bool:
        """Whether a sequence is its blocks and nothing else."""
        return not (self.states or self.encoder)

    def block_bytes(self, ops: BaseOps) -> int:
        """Bytes of one block in all layers; 0 where none has blocks."""
        return sum(ops.block_bytes(layer) for layer in self.paged)

    def encoder_block_bytes(self, ops: BaseOps) -> int:
        """Bytes of one block of encoder keys in all layers; 0 where none has such."""
        return sum(ops.block_bytes(layer) for layer in self.encoder)

    @property
    def item_rows(self) -> int:
        """Rows of a media item that layers attend to, at the most; 0 where none do."""
        return max((layer.item_rows for layer in self.encoder), default=0)

    def most_encoder_bytes(self, ops: BaseOps, max_slots: int) -> int:
        """Bytes of encoder keys that are of use: of one item for each slot."""
        blocks = -(-self.item_rows // ops.block_size) * max_slots + 1
        return blocks * self.encoder_block_bytes(ops)

    def state_bytes(self, max_slots: int) -> int:
        """Bytes of all places of all layers; 0 where none has state."""
        return state_places(max_slots) * sum(layer.nbytes for layer in self.states)


def state_places(max_slots: int) -> int:
    """Places of each layer's state: two for each slot, before a step and after it, and the zeros of place 0."""
    return 1 + 2 * max_slots


def cache_spec(layers: Sequence[LayerSpec]) -> CacheSpec:
    """Of the layers of a model. Raises InvalidRequest naming the first that keeps what is not served."""
    for number, layer in enumerate(layers):
        if not isinstance(layer, Paged | State | EncoderKeys):
            raise _unserved(number, layer, "layers whose cache is in blocks or in slots are served")
    return CacheSpec(
        tuple(layer for layer in layers if isinstance(layer, Paged)),
        tuple(layer for layer in layers if isinstance(layer, State)),
        tuple(layer for layer in layers if isinstance(layer, EncoderKeys)),
    )


def paged_layers(layers: Sequence[LayerSpec]) -> tuple[Paged, ...]:
    """The layers of a model that keeps everything in blocks, for what knows no other. Raises InvalidRequest naming the
    first that does not."""
    for number, layer in enumerate(layers):
        if not isinstance(layer, Paged):
            raise _unserved(number, layer, "layers whose whole cache is in blocks are served here")
    return cache_spec(layers).paged


def _unserved(number: int, layer: LayerSpec, served: str) -> InvalidRequest:
    return InvalidRequest(
        "UNSUPPORTED_MODEL", f"layer {number} keeps {layer}: only {served}", field="model"
    )
