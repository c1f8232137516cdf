"""What one decoder can hold, what its steps cost, how many tokens a step may have, and which must be in one step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import sqrt

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import INVALID_ARGUMENT, Error, Sequence
from shared.prompts.length_text import LENGTH_EXCEEDED, length_text

# Before a step has shown what attention costs: for a token and each token that it attends to, this share of what a
# token costs otherwise. It is 1/8,400 of the arithmetic of a model of 0.4 billion parameters and less for a larger one.
_SHARE_OF_PAIR = 1 / 8192
_LEARNING_RATE = 0.3  # share of a step's error that is taken over
_LARGEST_ERROR = 3.0  # a process that lost its core for a while says little about the next step
# While other sequences decode, one token in so many stays unused: a prompt that is computed alone may be a little
# longer without a second step for its last few tokens.
_RESERVED_SHARE = 17
_DECODERS = "This decoder's"


class AttentionKind(Enum):
    """How far a token's attention looks (`AttentionKind` in decoder.proto)."""

    CAUSAL = "each token sees what is before it"
    BIDIRECTIONAL_MEDIA = "media spans see themselves whole"
    PREFIX_LM = "the prompt sees itself whole"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of sequences that a model needs whole: media spans, prompts, or all that is not computed yet."""

    attention: AttentionKind = AttentionKind.CAUSAL
    whole_prompt: bool = False

    @property
    def are_media(self) -> bool:
        """Whether they are media spans alone."""
        return self.attention is AttentionKind.BIDIRECTIONAL_MEDIA and not self.whole_prompt

    def at(self, sequence: Sequence, start: int) -> int:
        """Tokens of the part that begins at index `start`; 0 if none does."""
        if self.whole_prompt:
            return sequence.num_tokens - start
        if self.attention is AttentionKind.PREFIX_LM:
            return max(0, sequence.prompt_len - start)
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            return next((span.length for span in sequence.media if span.offset == start), 0)
        return 0

    def chunk(self, sequence: Sequence, start: int, most: int) -> int:
        """Tokens from index `start` on that can be computed in one step: `most` or, so that no part is divided, fewer;
        more than `most` if a longer part begins there."""
        part = self.at(sequence, start)
        if most <= part:
            return part
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            for span in sequence.media:
                if span.offset < start + most < span.end:
                    return span.offset - start
        return most

    def longest(self, sequence: Sequence) -> int:
        """Tokens of the longest part that a sequence will ever have."""
        if self.whole_prompt:
            return sequence.length_limit - 1  # if it is computed again; the last token never is
        if self.attention is AttentionKind.PREFIX_LM:
            return sequence.prompt_len
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            return max((span.length for span in sequence.media), default=0)
        return 0

    def begin(self, sequence: Sequence, start: int, block_size: int) -> int:
        """Where a sequence goes on whose first `start` tokens are cached: there, or at the last block's border before
        it that is in no media span."""
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            for span in reversed(sequence.media):
                if span.offset < start < span.end:
                    start = span.offset // block_size * block_size
        return start


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of one decoder, as it announced them."""

    num_blocks: int
    block_size: int
    max_slots: int
    max_model_len: int
    max_batched_tokens: int
    num_host_blocks: int = 0
    parts: Parts = field(default_factory=Parts)  # of sequences, each computed in one step
    max_step_tokens: int = 0  # of a step with a part that needs more than max_batched_tokens
    has_state: bool = False  # a sequence is more than its blocks
    num_encoder_blocks: int = 0  # for the keys of media, where layers attend to them
    adapters: frozenset[str] = frozenset()  # digests of those that it has for as long as it runs
    max_adapters: int = 0  # that plans may load beside them
    max_drafts: int = 0  # that it puts into a row by itself
    kv_cache_dtype: str = ""  # of keys and values, where it is not the model's own

    @property
    def reuses_blocks(self) -> bool:
        """Whether a sequence can begin with blocks that were computed before. Where prompts are computed whole the rest
        of one cannot be computed after cached blocks."""
        return not (self.has_state or self.parts.whole_prompt)

    @property
    def largest_step(self) -> int:
        """Tokens of a step at the most."""
        return max(self.max_batched_tokens, self.max_step_tokens)

    @property
    def longest_part(self) -> int:
        """The longest part that can be computed, however many sequences decode."""
        return self.largest_step - (self.max_slots - 1)

    @property
    def max_tokens_of_one(self) -> int:
        """The longest sequence that can ever run here."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence can run here until its output is as long as it may be."""
        return self.has_adapter(sequence) and sequence.length_limit <= self.max_tokens_of_one

    def has_adapter(self, sequence: Sequence) -> bool:
        """Whether a sequence's adapter, if it has one, is here or can be loaded."""
        can_load = self.max_adapters > 0 and bool(sequence.lora_folder)
        return not sequence.lora_id or sequence.lora_id in self.adapters or can_load

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def refusal(self, sequence: Sequence, choices: int) -> Error | None:
        """Why a sequence, with so many choices of one prompt, can never run here; None if it can."""
        for reason, message in self._refusals(sequence, choices):
            return Error(reason, message, INVALID_ARGUMENT)
        return None

    def _refusals(self, sequence: Sequence, choices: int) -> Iterator[tuple[str, str]]:
        longest = self.max_tokens_of_one
        if not self.has_adapter(sequence):
            yield (
                "ADAPTER_CHANGED",
                "no decoder in service has the adapter that the request was admitted with, whose digest is"
                f" {sequence.lora_id[:64]}: send the request again, and give gateways and decoders the same"
                " --lora-modules and --allowed-adapter-dir",
            )
        if sequence.prompt_len >= longest:
            yield (
                "PROMPT_TOO_LONG",
                length_text(
                    longest,
                    f"the prompt has {sequence.prompt_len} tokens",
                    "shorten it, or give the decoder more KV memory",
                    _DECODERS,
                ),
            )
        if sequence.length_limit > longest:
            # The request says how long its output may be: if it were cut here, another decoder would give another text.
            yield (
                LENGTH_EXCEEDED,
                length_text(
                    longest,
                    f"prompt and answer may have {sequence.length_limit} tokens",
                    "lower max_tokens, or give gateway and decoders the same --max-model-len",
                    _DECODERS,
                ),
            )
        part = self.parts.longest(sequence)
        if part > max(0, self.longest_part):
            is_media = self.parts.are_media
            yield (
                "MEDIA_TOO_LONG" if is_media else "PROMPT_TOO_LONG",
                f"{'an image or video takes' if is_media else 'prompt and answer have'} {part} tokens that are "
                f"computed in one step, and this decoder computes at most {self.longest_part} beside "
                f"{self.max_slots - 1} others; use a smaller one, or give the decoder more "
                "--max-num-batched-tokens or fewer --max-num-seqs",
            )
        if self.num_encoder_blocks:
            needed = self.blocks_for(sum(span.rows for span in sequence.media))
            if needed > self.num_encoder_blocks:
                yield (
                    "TOO_MUCH_MEDIA",
                    f"the prompt's images take {needed} blocks of encoder keys and this decoder has "
                    f"{self.num_encoder_blocks}; send fewer, or give the decoder more --kv-cache-memory-bytes",
                )
        together = choices if sequence.beams is None else sequence.beams.num_beams
        if together > self.max_slots:
            yield (
                "TOO_MANY_CHOICES",
                f"{together} choices or beams run together and this decoder runs at most "
                f"{self.max_slots} sequences; ask for fewer",
            )


@dataclass(slots=True)
class Costs:
    """Microseconds that steps take: announced by the decoder, then corrected by every step; 0 is unknown.

    A step takes `of_step`, `of_token` for each token and `of_pair` for each pair of a token and a token that it
    attends to: a chunk late in a long prompt costs more than an early one of the same length.
    """

    of_step: float = 0.0
    of_token: float = 0.0
    of_pair: float = 0.0
    # To move one between device and host; while unknown, swapping is tried first.
    of_block: float = 0.0

    def announced(self, of_step: float, of_token: float) -> None:
        """What the decoder has measured at its start."""
        if of_step > 0:
            # A cost of 0 could never be corrected, since corrections are multiplied.
            self.of_step, self.of_token = of_step, max(of_token, of_step / 1000)
            self.of_pair = self.of_token * _SHARE_OF_PAIR

    def predict(self, tokens: int, pairs: int = 0) -> float:
        """How long a step takes."""
        return self.of_step + self.of_token * tokens + self.of_pair * pairs

    def learn(self, tokens: int, pairs: int, took: float) -> None:
        """A step with at least one token took so long.

        Each of the three is corrected by its share of the predicted time (normalized least mean squares over the
        shares). So steps of generated tokens alone, however many, leave what a prompt's token costs as it was, which a
        fit that forgets would lose or draw from noise; attention is corrected where it matters; and whatever does not
        follow the three is followed by them, since the next step is like the last one.
        """
        if not self.of_token:
            self.announced(took / 2, took / 2 / tokens)
            return
        parts = (self.of_step, self.of_token * tokens, self.of_pair * pairs)
        expected = sum(parts)
        error = min(took / expected - 1, _LARGEST_ERROR)
        rate = _LEARNING_RATE * error * expected / sum(part * part for part in parts)
        self.of_step *= 1 + rate * parts[0]
        self.of_token *= 1 + rate * parts[1]
        self.of_pair *= 1 + rate * parts[2]


class StepBudget:
    """How many prompt tokens still fit into one plan while it is filled.

    A step is bounded in tokens and, while sequences decode in it, in time, as the costs predict it. Prompts get what
    those sequences leave of `target` microseconds (0 is no bound), in whole blocks, but at least as much time as these
    take themselves, and at least a block. So prompts have half of each step however little the target is, and a step
    that exceeds the target takes twice what those that decode take alone. A part that may not be divided is exempt from
    both bounds: it raises them, as far as the decoder can go, once there is something left for prompts.
    """

    def __init__(self, plan: StepPlan, capacity: Capacity, costs: Costs, target: float) -> None:
        self._plan = plan
        self._capacity = capacity
        self._costs = costs
        self._target = target
        self._decoding = 0  # tokens of sequences that decode
        self._decoding_takes = 0.0  # microseconds of a step with these alone

    @property
    def whole(self) -> int:
        """Tokens that the decoder could still take in this step."""
        return self._capacity.max_batched_tokens - self._plan.num_tokens

    @property
    def raised(self) -> int:
        """Tokens of the longest part that the decoder could still take in this step."""
        return self._capacity.largest_step - self._plan.num_tokens

    def limit_prompts(self) -> None:
        """The rows so far decode: what is added from now on must not delay them."""
        plan = self._plan
        plan.has_decoding = True
        self._decoding = plan.num_tokens
        self._decoding_takes = self._costs.predict(plan.num_tokens, plan.num_pairs)

    def at(self, start: int) -> int:
        """Tokens that a chunk may have which starts at index `start` of its sequence."""
        if not self._plan.has_decoding:
            return self.whole
        block = self._capacity.block_size
        given = self._plan.num_tokens - self._decoding
        reserved = self._capacity.max_batched_tokens // _RESERVED_SHARE
        # Where so many decode that little more is left, the reserve is what a waiting prompt gets on with.
        tokens = max(self.whole - reserved, min(self.whole, block - given))
        if not self._target or not self._costs.of_token:
            return tokens
        in_target = self._in_time(start, self._target) // block * block
        half = self._in_time(start, 2 * self._decoding_takes)
        return min(tokens, max(in_target, half, block - given))

    def _in_time(self, start: int, step: float) -> int:
        """The most tokens with which a step takes `step` microseconds: token k of them attends to `start + k`."""
        costs, plan = self._costs, self._plan
        left = step - costs.predict(plan.num_tokens, plan.num_pairs)
        if left <= 0:
            return 0
        first = costs.of_token + costs.of_pair * start
        return int(2 * left / (first + sqrt(first * first + 2 * costs.of_pair * left)))
