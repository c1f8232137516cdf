"""What the decoder knows of each sequence: one row of every array here is one slot."""

from collections.abc import Mapping

import numpy as np

from services.decoder.media.media_spans import MediaSpan, embed_positions, read_spans
from services.decoder.worker.plans.plan import Plan, bad_plan
from shared.errors import InvalidRequest, ServingError
from shared.telemetry.request_names import names
from tessera.decoder.v1.decoder_pb2 import NewSequence

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
Slots = np.ndarray[tuple[int], np.dtype[np.int64]]

# `computed` of a sequence whose next row says where it starts: after `new`, or a fresh table.
ANY_START = -1
# A token that is being sampled: its id is known on the device alone.
PENDING = -1


class SlotTable:
    """Token histories, block tables and counts of all slots.

    A sequence is known from `introduce` or `fork` to `drop`. One that failed stays known and is
    ignored until then.
    """

    def __init__(
        self,
        max_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        rotary_axes: int = 0,
        media_ids: int = 0,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        """`rotary_axes` is 0 where a token's rotary position is its index; media_ids, adapters: see `DecoderModel`."""
        self._adapters = {} if adapters is None else adapters
        self.block_size = block_size
        self.known = np.zeros(max_slots, bool)
        self.failed = np.zeros(max_slots, bool)
        self.choice = np.zeros(max_slots, np.int32)
        self.adapter = np.zeros(max_slots, np.int32)  # its number; 0 is none
        self.prompt_len = np.zeros(max_slots, np.int32)
        self.prefix_len = np.zeros(max_slots, np.int32)  # of the prompt, `DecoderModel.prefix`
        self.length = np.zeros(max_slots, np.int32)  # tokens of prompt and output
        self.computed = np.full(max_slots, ANY_START, np.int32)
        # The last token of a sequence at its longest is sampled but never run. Pages of these
        # arrays are used when they are first written.
        self.tokens = np.zeros((max_slots, max_model_len + 1), np.int32)
        self.rotary: np.ndarray[tuple[int, int, int], np.dtype[np.int32]] | None = None
        if rotary_axes:
            self.rotary = np.zeros((rotary_axes, max_slots, max_model_len + 1), np.int32)
        self.table = np.zeros((max_slots, -(-max_model_len // block_size)), np.int32)
        self.table_len = np.zeros(max_slots, np.int32)
        self.media: dict[int, tuple[MediaSpan, ...]] = {}
        self.names: dict[int, dict[str, str]] = {}  # of the request, as log lines have them
        self.root_name: dict[int, bytes] = {}  # parent of the first block in the chain of names
        # Why sequences failed before any of their rows could say so.
        self.unreported: dict[int, ServingError] = {}
        self._max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._media_ids = media_ids

    @property
    def empty(self) -> bool:
        """Whether no sequence is known."""
        return not self.known.any()

    def clear(self) -> None:
        """Forgets every sequence."""
        self.drop(np.flatnonzero(self.known))

    def drop(self, slots: Ints | Slots) -> None:
        """Forgets sequences; unknown ones are no matter."""
        self.known[slots] = False
        self.failed[slots] = False
        self.adapter[slots] = 0
        self.table_len[slots] = 0
        for slot in slots.tolist():
            self.media.pop(slot, None)
            self.names.pop(slot, None)
            self.root_name.pop(slot, None)
            self.unreported.pop(slot, None)

    def introduce(self, sequence: NewSequence) -> Slots:
        """Takes in a sequence and returns its tokens as they were given (int64).

        Ids at embedding positions are clamped into the vocabulary for the look-up. Raises
        InvalidRequest or Precondition for what one request got wrong; the slot is then known and
        its owner has to `fail` it. A slot in use is a bad plan.
        """
        slot = sequence.slot
        if self.known[slot]:
            raise bad_plan(f"new: slot {slot} is in use by {self.names[slot]['request_id']}")
        if len(sequence.tokens) % 4:
            raise bad_plan("new: tokens are not whole int32")
        self.known[slot] = True
        self.computed[slot] = ANY_START
        self.choice[slot] = sequence.choice
        self.names[slot] = names(
            sequence.request_id, sequence.client_request_id, sequence.traceparent
        )
        self.root_name[slot] = sequence.root_name
        self.prompt_len[slot] = self.length[slot] = 0
        self.adapter[slot] = self._number_of(sequence.lora_id)
        tokens = np.frombuffer(sequence.tokens, "<i4").astype(np.int64)
        self._check_lengths(sequence, len(tokens))
        spans = read_spans(sequence.media, sequence.prompt_len, bool(self._media_ids))
        self.tokens[slot, : len(tokens)] = self._checked_ids(tokens, spans)
        self.prompt_len[slot] = sequence.prompt_len
        self.length[slot] = len(tokens)
        if spans:
            self.media[slot] = spans
        return tokens

    def set_rotary(
        self, slot: int, prompt: "np.ndarray[tuple[int, int], np.dtype[np.int32]]", delta: int
    ) -> None:
        """Rotary positions [axes, prompt_len] of the prompt; later tokens have index + delta."""
        if self.rotary is not None:
            count = prompt.shape[1]
            self.rotary[:, slot, :count] = prompt
            self.rotary[:, slot, count:] = np.arange(count, self.rotary.shape[2]) + delta

    def fail(self, slot: int, error: ServingError) -> None:
        """Ignores a sequence from now on; its next row reports why."""
        self.failed[slot] = True
        self.unreported[slot] = error

    def fork(self, child: int, parent: int, choice: int) -> None:
        """The child takes over tokens, media and block table; the parent keeps them."""
        if not self.known[parent]:
            raise bad_plan(f"fork: parent slot {parent} holds no sequence")
        if self.known[child]:
            raise bad_plan(f"fork: child slot {child} is in use")
        for array in (
            self.known,
            self.failed,
            self.adapter,
            self.prompt_len,
            self.prefix_len,
            self.length,
            self.computed,
            self.table_len,
        ):
            array[child] = array[parent]
        self.choice[child] = choice
        length, blocks = self.length[parent], self.table_len[parent]
        self.tokens[child, :length] = self.tokens[parent, :length]
        if self.rotary is not None:
            self.rotary[:, child] = self.rotary[:, parent]
        self.table[child, :blocks] = self.table[parent, :blocks]
        self.names[child] = self.names[parent]
        self.root_name[child] = self.root_name[parent]
        if parent in self.media:
            self.media[child] = self.media[parent]

    def set_last_tokens(self, slots: Ints, tokens: Ints) -> None:
        """Puts another token in the place of each sequence's last one, which must not be computed yet."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            last = int(self.length[slot]) - 1
            if not self.known[slot] or last < max(self.prompt_len[slot], self.computed[slot]):
                raise bad_plan(f"set_token: slot {slot} has no last token that may be chosen")
            if not 0 <= token < self.vocab_size:
                raise bad_plan(f"set_token: {token} is outside the vocabulary")
            self.tokens[slot, last] = token

    def edit_tables(self, plan: Plan) -> None:
        """table[slot][index : index + len] = blocks; its length afterwards is index + len."""
        taken = 0
        for slot, index, count in zip(
            plan.edit_slot.tolist(), plan.edit_index.tolist(), plan.edit_len.tolist(), strict=True
        ):
            if not self.known[slot]:
                raise bad_plan(f"edit: slot {slot} holds no sequence")
            if index > self.table_len[slot]:
                raise bad_plan(f"edit: slot {slot} has no entry before {index}")
            self.table[slot, index : index + count] = plan.edit_blocks[taken : taken + count]
            self.table_len[slot] = index + count
            taken += count
            # A table begun anew may hold other blocks (preemption, prefix hits, swap-in): where
            # to go on is then the scheduler's knowledge.
            if index == 0 or self.table_len[slot] * self.block_size < self.computed[slot]:
                self.computed[slot] = ANY_START

    def extend(self, slots: Slots, computed: Ints) -> None:
        """Makes a place for one token of each sequence, which is being sampled; `computed` tokens before it are in the
        cache, or will be when it is known."""
        lengths = self.length[slots]
        self.tokens[slots, lengths] = PENDING
        self.length[slots] = lengths + 1
        self.computed[slots] = computed

    def fill_in(self, slots: Slots, places: Ints, tokens: Ints) -> None:
        """Puts a sampled token in each sequence's place; takes the place away again where the token is -1."""
        self.tokens[slots, places] = tokens
        self.length[slots[tokens < 0]] -= 1

    def put_drafts(self, slot: int, tokens: Ints) -> None:
        """Writes drafts behind a sequence's tokens, for its next row to find; they are none of them."""
        if ((tokens < 0) | (tokens >= self.vocab_size)).any():
            raise bad_plan(f"draft_token: slot {slot} has one outside the vocabulary")
        length = int(self.length[slot])
        self.tokens[slot, length : length + len(tokens)] = tokens

    def append(self, slot: int, tokens: Ints) -> None:
        """Tokens that a row with drafts gave: all but the last are in the cache, and nothing behind it counts."""
        length = int(self.length[slot])
        self.tokens[slot, length : length + len(tokens)] = tokens
        self.length[slot] = length + len(tokens)
        self.computed[slot] = length + len(tokens) - 1

    def _check_lengths(self, sequence: NewSequence, count: int) -> None:
        if not 1 <= sequence.prompt_len <= count:
            raise InvalidRequest(
                "INVALID_SEQUENCE",
                f"prompt_len {sequence.prompt_len} is not in [1, {count}], the number of tokens",
                field="prompt_len",
            )
        if count > self._max_model_len:
            raise InvalidRequest(
                "TOO_LONG",
                f"{count} tokens are more than --max-model-len {self._max_model_len}",
                field="prompt",
            )

    def _number_of(self, lora_id: str) -> int:
        if not lora_id:
            return 0
        number = self._adapters.get(lora_id)
        if number is None:
            raise InvalidRequest(
                "ADAPTER_CHANGED",
                f"this decoder has no adapter with the digest {lora_id[:64]}: give all services the same"
                " --lora-modules and --allowed-adapter-dir",
                field="lora_id",
            )
        return number

    def _checked_ids(self, tokens: Slots, spans: tuple[MediaSpan, ...]) -> Slots:
        places = embed_positions(spans)
        clamped = tokens.copy()
        clamped[places] = np.clip(clamped[places], 0, self.vocab_size - 1)
        bounds = np.full(len(tokens), self.vocab_size, np.int64)
        if self._media_ids:
            for span in spans:
                bounds[span.start : span.end] = self._media_ids
        wrong = np.flatnonzero((clamped < 0) | (clamped >= bounds))
        if len(wrong):
            raise InvalidRequest(
                "INVALID_TOKEN",
                f"token {tokens[wrong[0]]} at position {wrong[0]} is outside the vocabulary of"
                f" {self.vocab_size}",
                field="tokens",
            )
        return clamped
