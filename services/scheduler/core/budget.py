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
# Of drafts: the share that is accepted before any was, and by how much one changes that of its sequence and of all.
_FIRST_ACCEPTANCE = 0.6
_ACCEPTANCE_RATE = 0.2
_USUAL_RATE = 0.02
_LEAST_GAIN = (
    1.02  # in tokens a second: below it drafts are not worth what may be wrong about their cost
)
_DRAFTED_IN_A_ROW = 64  # steps, until one without drafts shows what that takes
_TOKENS_BETWEEN_PROBES = 32
_OWN_RATE, _SHARED_RATE = (
    0.1,
    0.15,
)  # shares of a step's error that are taken over, by steps of its size and by all
_FORGOTTEN_AFTER = 512  # steps


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


class Lookahead:
    """How many drafts the rows of sequences that decode may have: as many as give the most tokens a second, often none.

    A draft costs what a step with one token more was measured to take, and gives a token with the probability that it
    and all before it in its row are accepted, by the share of the sequence's latest ones that were. Both are learned
    from steps that are computed anyway: every so often one has no drafts, and a sequence whose drafts do not pay is
    given one.
    """

    def __init__(self, most: int) -> None:
        """`most`: drafts of a row."""
        self._most = most
        self._plain, self._drafted = _StepTimes(), _StepTimes()
        self._steps = self._drafted_in_a_row = 0
        self._usual = _FIRST_ACCEPTANCE  # of sequences that have had no drafts
        self.is_pausing = False  # the drafts of this step, to measure one without
        # Since the start.
        self.rows = 0
        self.accepted = [0] * most  # by place behind the row's own token
        self.tokens = 0

    def choose(self, sequences: list[Sequence], decoding: int) -> None:
        """Sets `num_drafts` of sequences that may have some in the next plan, in which `decoding` sequences decode,
        themselves included."""
        for sequence in sequences:
            sequence.num_drafts = 0
        plain = self._plain.at_most(decoding)
        self.is_pausing = not plain or self._drafted_in_a_row >= _DRAFTED_IN_A_ROW
        if self.is_pausing:
            self._drafted_in_a_row = 0
            return
        total, chosen = float(decoding), 0
        best = least = total / plain * _LEAST_GAIN
        values = self._by_value(sequences)
        for count, (value, _) in enumerate(values, 1):
            total += value
            rate = total / (self._drafted.at_most(decoding + count) or plain)
            if rate > best:
                best, chosen = rate, count
            if not self._drafted.knows(decoding + count):
                break  # it is tried, if it may pay, before larger ones
        for _, sequence in values[:chosen]:
            sequence.num_drafts += 1
        # A draft for those whose drafts do not pay, where one that is right would.
        if (decoding + 1) / (self._drafted.at_most(decoding + 1) or plain) > least:
            for sequence in sequences:
                if not sequence.num_drafts and sequence.num_tokens >= sequence.probe_from:
                    sequence.num_drafts = 1
                    sequence.probe_from = sequence.num_tokens + _TOKENS_BETWEEN_PROBES

    def _by_value(self, sequences: list[Sequence]) -> list[tuple[float, Sequence]]:
        """All drafts that there may be, each with the tokens that it is expected to give: the most first."""
        values: list[tuple[float, Sequence]] = []
        for sequence in sequences:
            share = sequence.acceptance
            value = share = self._usual if share < 0 else share
            for _ in range(min(self._most, sequence.length_limit - sequence.num_tokens - 1)):
                values.append((value, sequence))
                value *= share
        values.sort(key=_value, reverse=True)
        return values

    def put_off(self, sequence: Sequence) -> int:
        """Tokens for which a sequence without drafts need not be looked at."""
        sequence.probe_from = max(sequence.probe_from, sequence.num_tokens + _TOKENS_BETWEEN_PROBES)
        return _TOKENS_BETWEEN_PROBES

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of the drafts of a row."""
        if not drafted:
            return
        self.rows += 1
        self.tokens += drafted
        share = self._usual if sequence.acceptance < 0 else sequence.acceptance
        for place in range(accepted):
            self.accepted[place] += 1
            share += _ACCEPTANCE_RATE * (1 - share)
            self._usual += _USUAL_RATE * (1 - self._usual)
        if accepted < drafted:
            share -= _ACCEPTANCE_RATE * share
            self._usual -= _USUAL_RATE * self._usual
        else:  # one more is worth a try
            sequence.probe_from = sequence.plain_until = 0
        sequence.acceptance = share

    def measure(self, plan: StepPlan, drafted: int, took: float) -> None:
        """A step with so many drafts took so many microseconds."""
        self._steps += 1
        self._drafted_in_a_row = self._drafted_in_a_row + 1 if drafted else 0
        generates = len(plan.row_slot) == len(plan.sample_row) == plan.num_tokens - drafted
        if generates and took > 0:  # results that were held up may come at one time
            mine, other = self._plain, self._drafted
            if drafted:
                mine, other = other, mine
            # Most of what differs from before is the machine's doing, and concerns all steps.
            other.scale *= mine.learn(self._steps, plan.num_tokens, took)
        if self._steps % _FORGOTTEN_AFTER == 0:
            self._plain.forget(self._steps - _FORGOTTEN_AFTER)
            self._drafted.forget(self._steps - _FORGOTTEN_AFTER)


class _StepTimes:
    """Microseconds of steps that only generate, by their tokens: many numbers together, and the later the more."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._us: dict[int, float] = {}  # to be multiplied by the scale
        self._seen: dict[int, int] = {}  # the latest step

    def knows(self, tokens: int) -> bool:
        """Whether steps of this size were seen."""
        return _size_class(tokens) in self._us

    def at_most(self, tokens: int) -> float:
        """Of the largest known step with no more tokens; 0 if none is known: what is not known is tried."""
        size = _size_class(tokens)
        if size in self._us:
            return self._us[size] * self.scale
        below = [known for known in self._us if known < size]
        return self._us[max(below)] * self.scale if below else 0.0

    def learn(self, step: int, tokens: int, took: float) -> float:
        """Takes in what a step took. Returns by how much steps of all sizes seem to take longer than before."""
        size = _size_class(tokens)
        self._seen[size] = step
        known = self._us.get(size)
        if known is None:
            self._us[size] = took / self.scale
            return 1.0
        error = max(-0.5, min(0.5, took / (known * self.scale) - 1))
        self._us[size] = known * (1 + _OWN_RATE * error)
        shared = 1 + _SHARED_RATE * error
        self.scale *= shared
        return shared

    def forget(self, before: int) -> None:
        """What was measured before a step is tried again."""
        for size in [size for size, seen in self._seen.items() if seen < before]:
            del self._seen[size], self._us[size]


def _size_class(tokens: int) -> int:
    """Steps of up to 16 tokens are told apart, eight sizes between a larger power of two and the next."""
    shift = max(0, tokens.bit_length() - 4)
    return tokens if tokens <= 16 else tokens >> shift << shift


def _value(one: tuple[float, Sequence]) -> float:
    return one[0]
