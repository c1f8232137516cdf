"""A request that this scheduler owns: its sequences for the core, and the writers of its log."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.sequence import (
    Ending,
    Error,
    MediaSpan,
    Sequence,
)
from services.scheduler.output import beams
from services.scheduler.output.choice import Choice
from services.scheduler.output.logprobs import Floats, Ids
from services.scheduler.output.ranking import Ranking
from services.scheduler.output.stop_strings import stop_finder
from shared import numerics
from shared.artifacts.embedding_name import embedding_name
from shared.prompts.modality import modality_of
from shared.queue import TakenRequest
from shared.queue.log_event import PROMPT, Origin
from shared.queue.token_log import encode_records
from shared.telemetry.request_names import names
from shared.text.stop_search import StopStrings
from shared.text.text_fold import TokenBytes
from tessera.common.v1.media_pb2 import MediaItem
from tessera.common.v1.pooling_pb2 import PooledRows
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import Hello

_PRIORITIES = {"interactive": 0, "batch": 1}
SUSPECT = 2  # lost decoders after which it is isolated ...
# ... up to the place where it was when the last one was lost, which was two plans ahead of the log at the most, with
# three drafts each, and a little farther; to its end if it was past that place and another one was lost nevertheless.
_ISOLATED_FOR = 12
_TO_ITS_END = 1 << 40


class WantedItem(NamedTuple):
    """A media item, and the numerics of the encoders that are to encode it."""

    item: MediaItem
    numerics: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A request that no sequence could be made of."""

    request_id: str
    collects: bool = False

    def origin_of(self, records: bytes) -> Origin:
        """There are none."""
        return Origin()


class Request:
    """Where the choices are the sequences, their tokens are logged as they come. With `best_of` or beams nothing is
    logged until all have ended: `ranking` keeps the outputs, a `BeamSearch` the beams.
    """

    def __init__(
        self,
        taken: TakenRequest,
        table: TokenBytes,
        encoder_numerics: str = "",
        adapter_folder: str = "",
    ) -> None:
        """encoder_numerics: of the vision encoders that are to encode its media; adapter_folder: where decoders find
        its adapter. Raises ValueError or IndexError for a spec that makes no sense, InvalidRequest for media of an
        unknown modality.
        """
        spec = taken.spec
        sampling = spec.sampling
        self.spec = spec
        self.request_id = spec.request_id
        self.content = taken.content  # the weights that compute it, in hex
        self.num_choices = sampling.n
        self.logprobs = sampling.logprobs if sampling.HasField("logprobs") else None
        self.collects = sampling.use_beam_search or sampling.best_of > sampling.n
        self.lost_decoders = taken.lost_decoders  # while they computed something of it
        # Seconds from admission to a decoder, once it has been there; None where an earlier owner would have to know.
        self.queue_s: float | None = None
        self.taken_at = 0.0  # by the dispatcher's clock
        self._preempted_before = 0  # at other decoders
        self._taken = taken
        self._table = table
        self._encoder_numerics = encoder_numerics
        self._adapter_folder = adapter_folder
        self._is_logged = any(taken.logs) or bool(taken.prompt_log)
        self._begun_in = taken.numerics  # what its first record was computed in; empty before
        self._runs_in = ""  # what the next ones are
        self._is_exact = taken.is_exact  # what is logged
        self._stays_exact = True  # if the next records are logged
        self._computes_again_alike = True
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        self._search = None
        if sampling.use_beam_search:
            self._search = beams.search_of(spec, table, self._stops)
        self.sampling = self._for_decoder(sampling)
        self.ranking = Ranking(sampling.n) if self.collects else None
        for item in spec.media:
            modality_of(item)
        # As encoder and decoder know them: their digests name embeddings by these weights and numerics.
        self.media = [_named(item, self._content_bytes, encoder_numerics) for item in spec.media]
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
            (self.fresh or self.sequences)[0].reads_prompt = True

    @property
    def _content_bytes(self) -> bytes:
        return bytes.fromhex(self.content)

    @property
    def error(self) -> Error | None:
        """Why it cannot be run, if it cannot."""
        return beams.refusal(self.spec.sampling, self._search) if self._search else None

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
            lost_decoders=self.lost_decoders,
            numerics=self._begun_in,
            is_exact=self._is_exact,
        )

    @property
    def decoder_numerics(self) -> str | None:
        """Those of the decoder that its first record is from; None where there is none."""
        return numerics.of_decoder(self._begun_in) if self._is_logged else None

    def place(self, hello: Hello) -> None:
        """A decoder is to run it. What has been logged goes on exactly where the arithmetic is the one that it was
        begun in and no row depends on its neighbours."""
        encoder = self._encoder_numerics if self.media else None
        self._runs_in = numerics.joined(hello.numerics, encoder)
        varies = encoder is not None and numerics.vary(encoder)
        self._computes_again_alike = hello.row_invariant and not varies
        equal = self._computes_again_alike and self._runs_in == self._begun_in
        self._stays_exact = equal or not self._is_logged

    def computes_again(self) -> None:
        """What was computed of it behind its first token is lost, and computed again where it runs."""
        if self._computes_again_alike:
            return
        self._stays_exact = False
        for writer in self._writers.values():
            writer.token_prefix = b""  # the next event says so

    def origin_of(self, records: bytes) -> Origin:
        """Where records come from that are about to be logged. Without any, where those before them do."""
        if records:
            self._is_logged = True
            self._begun_in = self._begun_in or self._runs_in
            self._is_exact = self._is_exact and self._stays_exact
        return Origin(self.content, self._begun_in, self._is_exact)

    @property
    def names(self) -> dict[str, str]:
        """Fields of a log line about it."""
        return names(self.request_id, self.spec.client_request_id, self.spec.traceparent)

    @property
    def num_preemptions(self) -> int:
        """How often its sequences had to wait again, all together; of beams, one from its beginning on."""
        if self._search is not None:
            now = max((beam.num_preemptions for beam in self._search.live), default=0)
        else:
            now = sum(sequence.num_preemptions for sequence in self._begun)
        return self._preempted_before + now

    @property
    def all_sequences(self) -> list[Sequence]:
        """Those that it was begun with here, whether they have ended or not."""
        return self._begun

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all of them, those that were logged before it came here too."""
        return sum(sequence.num_output_tokens for sequence in self._begun)

    @property
    def was_resumed(self) -> bool:
        """Whether it had tokens already when it came here."""
        return any(self._taken.logs)

    @property
    def waited_us(self) -> tuple[int, int]:
        """From when to when it was in the queue before it was taken for the first time, by the clock of Redis."""
        return 1000 * self._taken.arrived_ms, self._taken.own_at

    @property
    def attempts(self) -> int:
        """Times that it was taken from the queue."""
        return self._taken.attempts

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
        """It has ended here, or is another scheduler's or another object's. Breaks the reference cycle with its
        sequences, which would else keep it until a full garbage collection. Events that are yet to be written can
        still be written.
        """
        for sequence in self._begun:
            sequence.payload = None
            if sequence.beams is not None:
                sequence.beams.clear()
        self._begun = []
        self.sequences, self.fresh, self._writers, self.prompt_log = [], [], {}, None

    def again(self) -> "Request":
        """The same request to go on at another decoder, with its logged tokens; ranked outputs and beams begin anew."""
        request = Request(self.taken, self._table, self._encoder_numerics, self._adapter_folder)
        request.queue_s, request.taken_at = self.queue_s, self.taken_at
        request._preempted_before = self.num_preemptions
        return request

    def choice(self, number: int) -> Choice:
        """What writes the log of one choice."""
        writer = self._writers.get(number)
        if writer is None:
            log = b"" if self.collects else self._taken.logs[number]
            width = self.spec.pooling.width
            writer = self._writers[number] = Choice(self, number, self.logprobs, log, width)
        return writer

    def open_choices(self) -> Iterator[Choice]:
        """The choices without an ending in their log."""
        numbers = range(self.num_choices) if self.collects else (s.choice for s in self.sequences)
        return (self.choice(number) for number in numbers)

    def hypothesis(self, search: BeamSearch[Sequence], number: int) -> tuple[bytes, Ending]:
        """Log records and ending of one of the hypotheses that a search has found, best first."""
        return beams.result_of(search, number, self.spec, self._table, self._stops)

    def prompt_records(self, first: int, own: Floats, ids: Ids, values: Floats) -> bytes:
        """The log of prompt tokens from index `first` on."""
        tokens = self._prompt[first : first + len(own)]
        return encode_records(tokens, own, ids, values, self.spec.sampling.prompt_logprobs)

    def sampling_of(self, sequence: Sequence) -> SamplingParams:
        """The settings that introduce a sequence to a decoder."""
        if not self.sampling.HasField("prompt_logprobs") or sequence.reads_prompt:
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
        if self._search is not None:
            # The decoder reports the most probable tokens; which of them is taken is decided here.
            changed.use_beam_search = False
            changed.temperature = 0.0
            changed.logprobs = max(changed.logprobs, self._search.num_top)
            changed.min_tokens = 0
        return changed

    def _sequence(self, number: int) -> Sequence:
        spec, sampling, pooling = self.spec, self.spec.sampling, self.spec.pooling
        generated: list[int] = []
        if not self.collects and not pooling.width:
            generated = self.choice(number).known_tokens(self._taken.logs[number])
        stop_search = None
        if self._stops is not None and self._search is None:
            stop_search = stop_finder(self._table, self._stops, spec, generated[:-1])
        sequence = Sequence(
            request_id=spec.request_id,
            tokens=self._prompt + generated,
            prompt_len=len(self._prompt),
            max_tokens=sampling.max_tokens,
            choice=number,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            stop_search=stop_search,
            media=tuple(
                MediaSpan(
                    named.digest,
                    item.offset,
                    item.length,
                    item.rows,
                    WantedItem(item, self._encoder_numerics),
                )
                for item, named in zip(spec.media, self.media, strict=True)
            ),
            lora_id=spec.lora_id,
            lora_folder=self._adapter_folder,
            cache_salt=spec.cache_salt,
            content=self._content_bytes,
            priority=_PRIORITIES.get(self._taken.prio, 0),
            arrival=self._taken.arrived_ms,
            isolated_until=self._isolated_until(len(self._prompt) + len(generated)),
            num_logprobs=self.sampling.logprobs if self.sampling.HasField("logprobs") else -1,
            reads_prompt=pooling.rows == PooledRows.POOLED_ROWS_MEAN,
            reads_logits=_reads_logits(sampling),
            pooled_width=pooling.width,
            beams=self._search,
        )
        writer = Choice(self, number, self.logprobs) if self.collects else self.choice(number)
        writer.sequence = sequence
        sequence.payload = writer
        # The last token of a log without an ending is looked at once more: it may be all that was meant to be there.
        if generated and (ending := sequence.ending_after(generated[-1])) is not None:
            self.over[number] = ending
        return sequence

    def _isolated_until(self, known_tokens: int) -> int:
        if self.lost_decoders < SUSPECT:
            return 0
        if (
            self.lost_decoders > SUSPECT or self.collects
        ):  # of what is not logged yet no place is known
            return _TO_ITS_END
        return known_tokens + _ISOLATED_FOR


def _named(item: MediaItem, content: bytes, numerics: str) -> MediaItem:
    if not content and not numerics:
        return item
    named = MediaItem()
    named.CopyFrom(item)
    named.digest = embedding_name(content, item.digest, numerics)
    return named


def _reads_logits(sampling: SamplingParams) -> bool:
    """Whether a token is more than the one with the largest logit, which decoders may find sooner than all logits."""
    changed = (
        sampling.temperature,
        sampling.repetition_penalty != 1,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.min_tokens,
        sampling.no_repeat_ngram_size,
        sampling.grammar,
        sampling.HasField("logprobs"),
        sampling.logit_bias,
        sampling.allowed_token_ids,
        sampling.bad_token_ids,
        sampling.bad_words,
        sampling.first_bad_token_ids,
    )
    return any(changed)
