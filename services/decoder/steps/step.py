"""What a decoder's `forward` gets beside the hidden rows: the tokens of one step and where they belong."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.decoder.steps.attention_meta import AttnMeta
from services.decoder.steps.encoder_keys import AttendingTokens
from services.decoder.steps.slot_state import LayerState


@dataclass(frozen=True)
class Step:
    """T tokens of several sequences as one ragged batch, padding included; rows in the order of `meta`."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [1 or rotary axes, T]
    meta: AttnMeta
    slots: Sequence[int]  # slot of each row
    # int64 [n], ascending: tokens that take an embedding row; None where none does
    media: Tensor | None = None
    levels: Sequence[Tensor] = ()  # deepstack rows [T, H], one tensor for each level
    # Numbers of adapters (`DecoderModel.adapters`), each with its tokens: int64 [n], ascending
    adapters: Sequence[tuple[int, Tensor]] = ()
    states: Sequence[LayerState] = ()  # one for each layer that is a `State`, in their order
    attending: AttendingTokens | None = (
        None  # where layers are `EncoderKeys`; None where no token attends
    )
