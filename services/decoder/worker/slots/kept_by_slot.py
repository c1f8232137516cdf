"""What a worker keeps of each sequence under the number of its slot: one interface for all of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from services.decoder.media.embeddings import Embeddings
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.sampling.sampler import Sampler
from services.decoder.worker.plans.plan import Prepared
from services.decoder.worker.slots.slot_states import SlotStates
from services.decoder.worker.slots.slots import SlotTable
from tessera.decoder.v1.decoder_pb2 import NewSequence

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
# The slow part of an introduction, to be called on a helper thread.
Work = Callable[[], object]

_HELPERS = 2  # threads: one slow preparation does not hold up another


@dataclass(frozen=True)
class Introduced:
    """A sequence that has become known to the table of slots."""

    message: NewSequence
    tokens: Ids  # prompt and output, as they were given
    prepared: "Future[object] | None" = None  # of what `KeptBySlot.prepare` gave, done or not

    @property
    def prompt(self) -> Ids:
        """Its tokens."""
        return self.tokens[: self.message.prompt_len]

    @property
    def output(self) -> Ids:
        """What had been generated before it came here."""
        return self.tokens[self.message.prompt_len :]


class KeptBySlot(ABC):
    """Something that is kept for each sequence from when it is introduced, or forked of another, until it is dropped.

    All but `prepare` is called with the worker's lock held, in the order of the plans, and must be quick.
    """

    def prepare(self, message: NewSequence) -> Work | None:
        """What of an introduction takes long, None if nothing does; asked when a plan is accepted, often long before it
        is applied. What comes of a sequence must not depend on when the work is done, nor what it raises on when that
        is found: several ranks have to do the same."""
        return None

    @abstractmethod
    def introduce(self, slot: int, sequence: Introduced) -> None:
        """A sequence is known from now on. Raises a ServingError for what it got wrong: it fails alone."""

    def fork(self, child: int, parent: int, choice: int) -> None:  # noqa: B027
        """The child goes on as the choice with this number from where the parent is. Most have nothing to copy."""

    @abstractmethod
    def drop(self, slot: int) -> None:
        """Forgets a sequence, one whose introduction failed too; the table of slots still knows it."""


class Preparations:
    """Runs the slow parts of introductions beside the steps."""

    def __init__(self, kept: Sequence[KeptBySlot]) -> None:
        self._kept = kept
        self._pool = ThreadPoolExecutor(_HELPERS, "prepare")  # threads start when they are needed

    def begin(self, message: NewSequence) -> Prepared:
        """Of one new sequence what is being prepared, by who asked for it."""
        found: dict[Hashable, Future[object]] = {}
        for kept in self._kept:
            if (work := kept.prepare(message)) is not None:
                found[kept] = self._pool.submit(work)
        return found


class SampledSlots(KeptBySlot):
    """Settings and counts of the sampler, and the grammars of its masks."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def prepare(self, message: NewSequence) -> Work | None:
        """A grammar has to be read, which may take some tenths of a second, and to follow the output."""
        if not message.sampling.grammar:
            return None

        def read() -> object:
            output = np.frombuffer(message.tokens, "<i4")[message.prompt_len :]
            return self._sampler.prepare(message.sampling, output.astype(np.int64))

        return read

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`."""
        given, prepared = sequence.message, sequence.prepared
        prompt, output = sequence.prompt, sequence.output
        self._sampler.introduce(slot, given.choice, given.sampling, prompt, output, prepared)

    def fork(self, child: int, parent: int, choice: int) -> None:
        """See `KeptBySlot.fork`."""
        self._sampler.fork(child, parent, choice)

    def drop(self, slot: int) -> None:
        """See `KeptBySlot.drop`."""
        self._sampler.drop(slot)


class MediaInUse(KeptBySlot):
    """Which embeddings sequences name."""

    def __init__(self, slots: SlotTable, embeddings: Embeddings) -> None:
        self._slots, self._embeddings = slots, embeddings

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`."""
        self._embeddings.use(self._digests(slot))

    def fork(self, child: int, parent: int, choice: int) -> None:
        """See `KeptBySlot.fork`."""
        self._embeddings.use(self._digests(child))

    def drop(self, slot: int) -> None:
        """See `KeptBySlot.drop`."""
        if digests := self._digests(slot):
            self._embeddings.unuse(digests)

    def _digests(self, slot: int) -> list[bytes]:
        return [span.digest for span in self._slots.media.get(slot, ())]


class PromptPlaces(KeptBySlot):
    """What the model says of a prompt's places: its prefix, and rotary positions. The table of slots has them."""

    def __init__(self, slots: SlotTable, model: DecoderModel) -> None:
        self._slots, self._model = slots, model

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`."""
        self._slots.prefix_len[slot] = self._model.prefix(sequence.prompt)
        if self._model.rotary_axes:
            rotary = self._model.positions(sequence.prompt, sequence.message.media)
            self._slots.set_rotary(slot, *rotary)

    def drop(self, slot: int) -> None:
        """The next one overwrites them."""


class LayerStates(KeptBySlot):
    """Which places of the layers' state sequences have."""

    def __init__(self, states: SlotStates) -> None:
        self._states = states

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`."""
        self._states.introduce(slot)

    def fork(self, child: int, parent: int, choice: int) -> None:
        """See `KeptBySlot.fork`."""
        self._states.fork(parent, child)

    def drop(self, slot: int) -> None:
        """See `KeptBySlot.drop`."""
        self._states.drop(slot)
