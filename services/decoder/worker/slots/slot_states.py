"""State that layers keep for each slot outside the blocks, such as that of recurrences.

A layer's state has places, and a slot holds two of them: what the last step left, and what that step began with. A step
reads the one, writes to a free place and takes that for its slots. So nothing is overwritten that may be read again:
a step that is computed a second time, for want of memory or on another token, begins where it did the first time. No
state is ever copied or zeroed: choices that share a prompt hold the same place, and a row that starts at token 0 reads
place 0, which is never written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.cache_spec import state_places
from services.decoder.models.layer_spec import State
from services.decoder.steps.slot_state import LayerState
from services.decoder.worker.slots.slots import Slots

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]

_ZEROS = 0  # the place of a sequence that has not begun


@dataclass(frozen=True)
class StateRows:
    """Where the rows of a step find their state, and where they leave it."""

    layers: Sequence[Sequence[Tensor]]  # by layer with state its tensors [places, ...]
    read: Slots
    write: Slots

    def select(self, index: Slots) -> "StateRows":
        """Of some of the rows, in the order given."""
        return replace(self, read=self.read[index], write=self.write[index])

    def on_device(self, read: Tensor, write: Tensor) -> list[LayerState]:
        """For each layer; given `read` and `write` on the device."""
        return [LayerState(tensors, read, write) for tensors in self.layers]


class SlotStates:
    """The places of all slots. Called in the order of plans, at their launch."""

    def __init__(self, layers: Sequence[State], ops: BaseOps, max_slots: int) -> None:
        """Allocates the state of these layers; there may be none."""
        places = state_places(max_slots)
        self._layers = [ops.alloc_state(layer.tensors, places) for layer in layers]
        self._now = np.full(max_slots, _ZEROS, np.int64)
        self._before = np.full(max_slots, _ZEROS, np.int64)
        # Tokens that the state of each slot covers: where its next row has to start, if not at 0.
        self._covered = np.zeros(max_slots, np.int64)
        self._holders = np.zeros(places, np.int64)
        self._free = list(range(places - 1, _ZEROS, -1))

    @property
    def empty(self) -> bool:
        """Whether no layer has state."""
        return not self._layers

    def continues(
        self, slots: Slots, starts: Slots
    ) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Which rows can start there: at token 0, or where the state ends."""
        found: Flags = (starts == 0) | (starts == self._covered[slots])
        return found

    def introduce(self, slot: int) -> None:
        """A sequence that has no state yet."""
        self.drop(slot)

    def fork(self, source: int, slot: int) -> None:
        """The slot goes on from the state that the source has now."""
        self._hold(int(self._now[source]))
        self.drop(slot)
        self._now[slot], self._covered[slot] = self._now[source], self._covered[source]

    def drop(self, slot: int) -> None:
        """Forgets a slot's state."""
        for places in (self._now, self._before):
            self._release(int(places[slot]))
            places[slot] = _ZEROS
        self._covered[slot] = 0

    def advance(self, slots: Slots, starts: Slots, ends: Slots) -> StateRows | None:
        """A step of rows [start, end) of these slots, no slot twice, is about to be computed; what the step before it
        began with is not needed any more. None where no layer has state."""
        if not self._layers:
            return None
        read = np.where(starts == 0, _ZEROS, self._now[slots])
        for slot in slots.tolist():
            self._release(int(self._before[slot]))
            self._before[slot] = self._now[slot]
            self._now[slot] = place = self._free.pop()
            self._holders[place] = 1
        self._covered[slots] = ends
        return StateRows(self._layers, read, self._now[slots])

    def go_back(self, slots: Slots, starts: Slots) -> None:
        """The step for which they advanced last is prepared anew."""
        if not self._layers:
            return
        for slot in slots.tolist():
            self._release(int(self._now[slot]))
            self._now[slot], self._before[slot] = self._before[slot], _ZEROS
        self._covered[slots] = starts

    def _hold(self, place: int) -> None:
        if place != _ZEROS:
            self._holders[place] += 1

    def _release(self, place: int) -> None:
        if place == _ZEROS:
            return
        self._holders[place] -= 1
        if not self._holders[place]:
            self._free.append(place)
