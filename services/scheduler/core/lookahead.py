"""How many drafts rows may have, by what steps were measured to take and how many drafts were right."""

from operator import attrgetter

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence

# The share of drafts that is accepted before any was, and by how much one changes that of its sequence and of all.
_FIRST_ACCEPTANCE = 0.6
_ACCEPTANCE_RATE = 0.2
_USUAL_RATE = 0.02
# In tokens a second: below it drafts are not worth what may be wrong about their cost.
_LEAST_GAIN = 1.02
_DRAFTED_IN_A_ROW = 64  # steps, until one without drafts shows what that takes
# What drafts may lose: this share of the time that passes, and at once no more than about so many steps.
_LOST_SHARE = 0.005
_MOST_LOST, _MOST_SAVED = 0.25, 1.0
_LARGEST_STEP = 2.0  # times that of one without drafts: more is the machine's doing
# A sequence whose drafts do not pay gets one after so many tokens, then after twice as many, ...
_FIRST_PROBE, _LAST_PROBE = 16, 512
# Times that a row had no draft, one after the other, until its sequence is asked for some less often, and until then
# still less often; every so many steps then.
_MISSES, _MANY_MISSES = 4, 8
_ASKED_EVERY, MOST_STEPS_BETWEEN = 8, 16
_LOOKED_AT_EVERY = 8  # tokens of a sequence that gets none
# Shares of a step's error that are taken over, by steps of its size and by all.
_OWN_RATE, _SHARED_RATE = 0.1, 0.15
_FIRST_STEPS = 3  # of a size: their mean counts
_FORGOTTEN_AFTER = 512  # steps
_reads_logits = attrgetter("reads_logits")


class Lookahead:
    """How many drafts the rows of sequences that decode may have: as many as give the most tokens a second, often none.

    A draft costs what a step with one token more was measured to take, and gives a token with the probability that it
    and all before it in its row are accepted, by the share of the sequence's latest ones that were. Both are learned
    from steps that are computed anyway: every so often one has no drafts, and a sequence whose drafts do not pay is
    given one, ever more rarely. Steps are told apart by what their samples read (`Sequence.reads_logits`).

    What is learned may be wrong, so gains are counted as well: what a step with drafts took is compared with what its
    tokens would have taken without. While that has lost more than half a percent of the time, there are none.
    """

    def __init__(self, most: int) -> None:
        """`most`: drafts of a row."""
        self._most = most
        # Without drafts and with some, of steps whose samples need their largest logits alone, and of others.
        self._times = {(reads, drafted): _StepTimes() for reads in _BOTH for drafted in _BOTH}
        self._steps = self._drafted_in_a_row = 0
        self._usual = _FIRST_ACCEPTANCE  # of sequences that have had no drafts
        self._saved = 0.0  # microseconds, by drafts
        self.is_pausing = False  # the drafts of this step, to measure one without
        # Since the start.
        self.rows = 0
        self.accepted = [0] * most  # by place behind the row's own token
        self.tokens = 0

    def choose(self, sequences: list[Sequence], decoding: int, *, reads_logits: bool) -> None:
        """Sets `num_drafts` of sequences that may have some in the next plan, in which `decoding` sequences decode,
        themselves included. reads_logits: whether any of these does."""
        for sequence in sequences:
            sequence.num_drafts = 0
        times = self._times[reads_logits, False]
        plain = times.at_most(decoding)
        self.is_pausing = not times.knows(decoding) or self._drafted_in_a_row >= _DRAFTED_IN_A_ROW
        if self.is_pausing:
            self._drafted_in_a_row = 0
            return
        sequences = self._are_asked(sequences) if self._saved >= 0 else []
        if not sequences:
            return
        total, chosen = float(decoding), 0
        best = least = total / plain * _LEAST_GAIN
        values = self._by_value(sequences)
        for count, (value, _) in enumerate(values, 1):
            total += value
            rate = total / self._drafted_us(decoding + count, plain, reads_logits)
            if rate > best:
                best, chosen = rate, count
            if not self._times[reads_logits, True].knows(decoding + count):
                break  # it is tried, if it may pay, before larger ones
        for _, sequence in values[:chosen]:
            sequence.num_drafts += 1
        # A draft for one whose drafts do not pay, where one that is right would.
        if (decoding + 1) / self._drafted_us(decoding + 1, plain, reads_logits) > least:
            self._probe(sequences)

    def _drafted_us(self, tokens: int, plain: float, reads_logits: bool) -> float:
        """What a step with drafts takes: no less than one without that has as many tokens, or fewer."""
        known = (self._times[reads_logits, drafted].at_most(tokens) for drafted in _BOTH)
        return max(plain, *known)

    def _probe(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.num_drafts and sequence.num_tokens >= sequence.probe_from:
                sequence.num_drafts = 1
                later = min(_LAST_PROBE, max(_FIRST_PROBE, 2 * sequence.probe_after))
                sequence.probe_after = later
                sequence.probe_from = sequence.num_tokens + later
                return

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

    def looks_after(self, sequence: Sequence) -> int:
        """Tokens after which a sequence is looked at again that is not waited for: 0 is the next one."""
        if self.is_pausing or (sequence.num_drafts and sequence.misses < _MISSES):
            return 0
        if sequence.misses >= _MISSES and sequence.asked_from > self._steps:
            return sequence.asked_from - self._steps
        return _LOOKED_AT_EVERY

    def _are_asked(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those for which there may be drafts. Where there were none several times, all are asked in the same steps, so
        that the steps between are as without drafts."""
        asked = [s for s in sequences if s.misses < _MISSES or self._steps >= s.asked_from]
        for sequence in asked:
            every = _ASKED_EVERY if sequence.misses < _MANY_MISSES else MOST_STEPS_BETWEEN
            sequence.asked_from = self._steps + every - self._steps % every
        return asked

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of the drafts of a row that could have some."""
        if not drafted:
            sequence.misses += 1
            return
        sequence.misses = 0
        self.rows += 1
        self.tokens += drafted
        sequence.drafts_run += drafted
        sequence.drafts_right += accepted
        share = self._usual if sequence.acceptance < 0 else sequence.acceptance
        for place in range(accepted):
            self.accepted[place] += 1
            share += _ACCEPTANCE_RATE * (1 - share)
            self._usual += _USUAL_RATE * (1 - self._usual)
        if accepted < drafted:
            share -= _ACCEPTANCE_RATE * share
            self._usual -= _USUAL_RATE * self._usual
        else:  # one more is worth a try
            sequence.probe_from = sequence.probe_after = sequence.plain_until = 0
        sequence.acceptance = share

    def measure(self, plan: StepPlan, drafted: int, accepted: int, took: float) -> None:
        """A step with so many drafts, of which so many were accepted, took so many microseconds."""
        self._steps += 1
        self._drafted_in_a_row = self._drafted_in_a_row + 1 if drafted else 0
        rows = len(plan.row_slot)
        generates = rows == len(plan.sample_row) == plan.num_tokens - drafted
        if generates and took > 0:  # results that were held up may come at one time
            reads_logits = any(map(_reads_logits, plan.sample_sequence))
            self._count(
                rows, self._times[reads_logits, False].at_most(rows), drafted, accepted, took
            )
            mine = self._times[reads_logits, drafted > 0]
            # Most of what differs from before is the machine's doing, and concerns all steps.
            shared = mine.learn(self._steps, plan.num_tokens, took)
            for other in self._times.values():
                if other is not mine:
                    other.scale *= shared
        if self._steps % _FORGOTTEN_AFTER == 0:
            for times in self._times.values():
                times.forget(self._steps - _FORGOTTEN_AFTER)

    def _count(self, rows: int, plain: float, drafted: int, accepted: int, took: float) -> None:
        """What drafts have saved, or lost; plain: what the step would have taken without."""
        if not drafted:
            self._saved = min(_MOST_SAVED * plain, self._saved + _LOST_SHARE * took)
            return
        saved = plain * (1 + accepted / rows) - min(took, _LARGEST_STEP * plain)
        self._saved = max(-_MOST_LOST * plain, min(_MOST_SAVED * plain, self._saved + saved))


_BOTH = (False, True)


class _StepTimes:
    """Microseconds of steps that only generate, by their tokens: many numbers together, and the later the more."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._us: dict[int, float] = {}  # to be multiplied by the scale
        self._seen: dict[int, int] = {}  # the latest step
        self._count: dict[int, int] = {}  # of steps

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
        count = self._count[size] = self._count.get(size, 0) + 1
        known = self._us.get(size)
        if known is None or count <= _FIRST_STEPS:
            now = took / self.scale
            self._us[size] = now if known is None else known + (now - known) / count
            return 1.0
        error = max(-0.5, min(0.5, took / (known * self.scale) - 1))
        self._us[size] = known * (1 + _OWN_RATE * error)
        shared = 1 + _SHARED_RATE * error
        self.scale *= shared
        return shared

    def forget(self, before: int) -> None:
        """What was measured before a step is tried again."""
        for size in [size for size, seen in self._seen.items() if seen < before]:
            del self._seen[size], self._us[size], self._count[size]


def _size_class(tokens: int) -> int:
    """Steps of up to 16 tokens are told apart, eight sizes between a larger power of two and the next."""
    shift = max(0, tokens.bit_length() - 4)
    return tokens if tokens <= 16 else tokens >> shift << shift


def _value(one: tuple[float, Sequence]) -> float:
    return one[0]
