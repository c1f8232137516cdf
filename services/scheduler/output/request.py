"""A request that this scheduler owns: its sequences for the core, and the writers of its log."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.scheduler.core.beams import BeamSearch, Step
from services.scheduler.core.sequence import (
    INVALID_ARGUMENT,
    Ending,
    EndReason,
    Error,
    MediaSpan,
    Sequence,
)
from services.scheduler.output.beam_stops import BeamStops
from services.scheduler.output.choice import Choice
from services.scheduler.output.logprobs import Floats, Ids
from services.scheduler.output.ranking import Ranking
from shared.queue import TakenRequest
from shared.queue.beam_search import conflict_with_beams
from shared.queue.log_event import PROMPT
from shared.queue.token_log import encode_records, encode_tokens
from shared.telemetry.request_names import names
from shared.text.text_fold import StopFinder, TokenBytes
from tessera.common.v1.sampling_pb2 import SamplingParams

_PRIORITIES = {"interactive": 0, "batch": 1}
_MAX_LOGPROBS = 1024  # that a decoder reports for one sample
_SUSPECT = 2  # lost decoders after which it is isolated ...
# ... up to the place where it was when the last one was lost, which was two plans ahead of the log at the most, and a
# little farther; to its end if it was past that place and another one was lost nevertheless.
_ISOLATED_FOR = 4
_TO_ITS_END = 1 << 40


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A request that no sequence could be made of."""

    request_id: str
    collects: bool = False


class Request:
    """Where the choices are the sequences, their tokens are logged as they come. With `best_of` or beams nothing is
    logged until all have ended: `ranking` keeps the outputs, a `BeamSearch` the beams.
    """

    def __init__(self, taken: TakenRequest, table: TokenBytes) -> None:
        """Raises ValueError or IndexError for a spec that makes no sense."""
        spec = taken.spec
        sampling = spec.sampling
        self.spec = spec
        self.request_id = spec.request_id
        self.num_choices = sampling.n
        self.logprobs = sampling.logprobs if sampling.HasField("logprobs") else None
        self.collects = sampling.use_beam_search or sampling.best_of > sampling.n
        self.deaths = taken.deaths  # decoders that were lost while they computed something of it
        # Seconds from admission to a decoder, once it has been there; None where an earlier owner would have to know.
        self.queue_s: float | None = None
        self.taken_at = 0.0  # by the dispatcher's clock
        self._taken = taken
        self._table = table
        self.sampling = self._for_decoder(sampling)
        self.ranking = Ranking(sampling.n) if self.collects else None
        self._prompt: list[int] = np.frombuffer(spec.prompt, "<i4").tolist()
        self._writers: dict[int, Choice] = {}
        self.over: dict[int, Ending] = {}  # choices whose log is complete but for its ending
        self.prompt_log: Choice | None = None
        if sampling.HasField("prompt_logprobs"):
            self.prompt_log = Choice(self, PROMPT, sampling.prompt_logprobs, taken.prompt_log)
        scored = self.prompt_log is None or self.prompt_log.length >= len(self._prompt) - 1
        self.sequences = [self._sequence(number) for number in self._open_numbers()]
        self._begun = list(self.sequences)
        # One computes the prompt for all that have no output yet; it is the one to score it.
        self.fresh = [s for s in self.sequences if not s.num_output_tokens]
        if not scored and self.sequences:
            (self.fresh or self.sequences)[0].scores_prompt = True

    @property
    def error(self) -> Error | None:
        """Why it cannot be run, if it cannot."""
        sampling = self.spec.sampling
        if not sampling.use_beam_search:
            return None
        if sampling.stop and sampling.min_tokens:
            message = "stop and min_tokens cannot both be combined with beam search: leave one out"
            return Error("UNSUPPORTED_WITH_BEAM_SEARCH", message, INVALID_ARGUMENT)
        if (conflict := conflict_with_beams(sampling)) is not None:
            message = f"{conflict} cannot be combined with beam search: leave it out"
            return Error("UNSUPPORTED_WITH_BEAM_SEARCH", message, INVALID_ARGUMENT)
        if self.sampling.logprobs > _MAX_LOGPROBS:
            message = (
                f"{self._search.num_beams} beams need the {self.sampling.logprobs} most probable tokens of each step"
                f" and decoders report {_MAX_LOGPROBS}; ask for fewer beams or stop ids"
            )
            return Error("TOO_MANY_BEAMS", message, INVALID_ARGUMENT)
        return None

    @property
    def taken(self) -> TakenRequest:
        """What a take would give if everything known of it were logged: to begin it anew, or to restore it."""
        logs, endings = list(self._taken.logs), list(self._taken.endings)
        for number, writer in self._writers.items():
            logs[number], endings[number] = writer.records(), writer.ending or endings[number]
        prompt_log = self.prompt_log.records() if self.prompt_log else b""
        return replace(
            self._taken,
            logs=tuple(logs),
            endings=tuple(endings),
            prompt_log=prompt_log,
            deaths=self.deaths,
        )

    @property
    def names(self) -> dict[str, str]:
        """Fields of a log line about it."""
        return names(self.request_id, self.spec.client_request_id)

    def begin(self, now: float) -> None:
        """A decoder has it, for the first time or again."""
        if self.queue_s is None and not any(self._taken.logs):
            self.queue_s = self.arrived_ago_ms / 1000 + now - self.taken_at

    @property
    def arrived_ago_ms(self) -> float:
        """Its age when it was taken, by the clock of Redis."""
        return self._taken.own_at / 1000 - self._taken.arrived_ms

    @property
    def has_begun(self) -> bool:
        """Whether there is a token of it, from here or from an earlier owner."""
        if any(self._taken.logs):
            return True
        search = self.sequences[0].beams if self.sequences else None
        live = search.live if search is not None else self.sequences
        return any(s.num_output_tokens for s in live) or len(self.sequences) < len(
            self._open_numbers()
        )

    def clear(self) -> None:
        """It has ended. Breaks the reference cycle with its sequences, which would else keep it until a full garbage
        collection. Events that are yet to be written can still be written.
        """
        for sequence in self._begun:
            sequence.payload = None
            if sequence.beams is not None:
                sequence.beams.clear()
        self._begun = []
        self.sequences, self.fresh, self._writers, self.prompt_log = [], [], {}, None

    def again(self) -> "Request":
        """The same request to go on at another decoder, with its logged tokens; ranked outputs and beams begin anew."""
        request = Request(self.taken, self._table)
        request.queue_s, request.taken_at = self.queue_s, self.taken_at
        return request

    def choice(self, number: int) -> Choice:
        """What writes the log of one choice."""
        writer = self._writers.get(number)
        if writer is None:
            log = b"" if self.collects else self._taken.logs[number]
            writer = self._writers[number] = Choice(self, number, self.logprobs, log)
        return writer

    def open_choices(self) -> Iterator[Choice]:
        """The choices without an ending in their log."""
        numbers = range(self.num_choices) if self.collects else (s.choice for s in self.sequences)
        return (self.choice(number) for number in numbers)

    def hypothesis(self, search: BeamSearch, number: int) -> tuple[bytes, Ending]:
        """Log and ending of one of the best that a search has found."""
        if number >= len(search.finished):
            message = f"beam search found {len(search.finished)} outputs only; ask for fewer"
            return b"", Ending(EndReason.ERROR, error=Error("TOO_FEW_HYPOTHESES", message))
        found = search.finished[number]
        steps = found.steps()
        if found.has_stop_string:
            return self._records(steps), self._ending_by_string(steps)
        reason = EndReason.LENGTH if found.stop_token_id is None else EndReason.STOP
        return self._records(steps), Ending(reason, stop_token_id=found.stop_token_id)

    def _ending_by_string(self, steps: list[Step]) -> Ending:
        search = self._stop_search([step.token for step in steps[:-1]])
        match = search.push(steps[-1].token) if search is not None else None
        if match is None:
            raise ValueError("a beam ended with a stop string that is not in its text")
        return Ending(EndReason.STOP, stop=match.stop, cut=match.cut_bytes)

    def _records(self, steps: list[Step]) -> bytes:
        tokens = [step.token for step in steps]
        if self.logprobs is None:
            return encode_tokens(tokens)
        own = np.array([step.logprob for step in steps], "<f4")
        ids = np.array([[token for token, _ in step.top] for step in steps], "<i4")
        values = np.array([[value for _, value in step.top] for step in steps], "<f4")
        return encode_records(tokens, own, ids, values, self.logprobs)

    def prompt_records(self, first: int, own: Floats, ids: Ids, values: Floats) -> bytes:
        """The log of prompt tokens from index `first` on."""
        tokens = self._prompt[first : first + len(own)]
        return encode_records(tokens, own, ids, values, self.spec.sampling.prompt_logprobs)

    def sampling_of(self, sequence: Sequence) -> SamplingParams:
        """The settings that introduce a sequence to a decoder."""
        if not self.sampling.HasField("prompt_logprobs") or sequence.scores_prompt:
            return self.sampling
        without = SamplingParams()
        without.CopyFrom(self.sampling)
        without.ClearField("prompt_logprobs")
        return without

    def _open_numbers(self) -> list[int]:
        sampling, endings = self.spec.sampling, self._taken.endings
        if sampling.use_beam_search:
            return [0]
        if self.collects:
            return list(range(sampling.best_of))
        return [c for c in range(sampling.n) if endings[c] is None]

    def _for_decoder(self, sampling: SamplingParams) -> SamplingParams:
        if not self.collects:
            return sampling
        changed = SamplingParams()
        changed.CopyFrom(sampling)
        changed.logprobs = self.logprobs or 0
        if sampling.use_beam_search:
            # The decoder reports the most probable tokens; which of them is taken is decided here.
            changed.use_beam_search = False
            changed.temperature = 0.0
            self._search = BeamSearch(
                num_beams=max(sampling.best_of, sampling.n),
                max_tokens=sampling.max_tokens,
                stop_token_ids=frozenset(sampling.stop_token_ids),
                min_tokens=sampling.min_tokens,
                length_penalty=sampling.length_penalty,
                early_stopping=sampling.early_stopping,
                exhaustive=sampling.early_stopping_never,
                completes_stop_string=self._beam_stops(),
                num_kept_top=self.logprobs or 0,
            )
            changed.logprobs = max(changed.logprobs, self._search.num_top)
            changed.min_tokens = 0
        return changed

    def _sequence(self, number: int) -> Sequence:
        spec, sampling = self.spec, self.spec.sampling
        generated = (
            [] if self.collects else self.choice(number).known_tokens(self._taken.logs[number])
        )
        sequence = Sequence(
            request_id=spec.request_id,
            tokens=self._prompt + generated,
            prompt_len=len(self._prompt),
            max_tokens=sampling.max_tokens,
            choice=number,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            stop_search=None if sampling.use_beam_search else self._stop_search(generated[:-1]),
            media=tuple(
                MediaSpan(item.digest, item.offset, item.length, item.rows, payload=item)
                for item in spec.media
            ),
            lora_id=spec.lora_id,
            cache_salt=spec.cache_salt,
            priority=_PRIORITIES.get(self._taken.prio, 0),
            arrival=self._taken.arrived_ms,
            isolated_until=self._isolated_until(len(self._prompt) + len(generated)),
            num_logprobs=self.sampling.logprobs if self.sampling.HasField("logprobs") else -1,
            beams=self._search if sampling.use_beam_search else None,
        )
        writer = Choice(self, number, self.logprobs) if self.collects else self.choice(number)
        writer.sequence = sequence
        sequence.payload = writer
        # The last token of a log without an ending is looked at once more: it may be all that was meant to be there.
        if generated and (ending := sequence.ending_after(generated[-1])) is not None:
            self.over[number] = ending
        return sequence

    def _isolated_until(self, known_tokens: int) -> int:
        if self.deaths < _SUSPECT:
            return 0
        if self.deaths > _SUSPECT or self.collects:  # of what is not logged yet no place is known
            return _TO_ITS_END
        return known_tokens + _ISOLATED_FOR

    def _beam_stops(self) -> BeamStops | None:
        stops = list(self.spec.sampling.stop)
        skip = self.spec.reply.skip_special_tokens
        return BeamStops(self._table, stops, skip_special_tokens=skip) if stops else None

    def _stop_search(self, generated: list[int]) -> StopFinder | None:
        sampling = self.spec.sampling
        if not sampling.stop:
            return None
        search = StopFinder(
            self._table,
            list(sampling.stop),
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=self.spec.reply.skip_special_tokens,
        )
        for token in generated:
            search.push(token)
        return search
