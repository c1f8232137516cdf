"""Arguments and results of the queue's verbs."""

from dataclasses import dataclass
from enum import IntEnum

from shared.errors import Expired, ServingError, Superseded
from shared.queue.log_event import UNKNOWN, Origin
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import RequestSpec

INTERACTIVE = "interactive"
BATCH = "batch"
PRIORITIES = (INTERACTIVE, BATCH)

CANCELLED = Ending(reason=FinishReason.FINISH_REASON_CANCELLED)


def _failed(error: ServingError) -> Ending:
    return Ending(reason=FinishReason.FINISH_REASON_ERROR, failure=error.to_failure())


QUEUE_TIMEOUT = _failed(
    Expired("QUEUE_TIMEOUT", "the request was not begun within its queue timeout; retry later")
)
FIRST_TOKEN_TIMEOUT = _failed(
    Expired("FIRST_TOKEN_TIMEOUT", "no token came within the first token timeout; retry later")
)
REQUEST_TIMEOUT = _failed(
    Expired(
        "REQUEST_TIMEOUT",
        "the request did not end within its timeout; allow more time or ask for less",
    )
)
MODEL_CHANGED = _failed(
    Superseded(
        "MODEL_CHANGED",
        "the answer was begun with weights that no decoder has any more, and another model does not go on with it; send"
        " the request again",
    )
)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long things last in Redis."""

    lease_ms: int = 1_500  # of a scheduler without renewal
    # Between reservation and admission; a later one is admitted all the same.
    reservation_ms: int = 5_000
    keep_ended_s: int = 600  # an ended request's log, for late readers
    grace_ms: int = 10_000  # that followers have to call again after Redis was away
    # A request that has begun waits so long for a decoder with the same weights while there are only others.
    same_content_ms: int = 120_000
    # An interactive request that has waited so long comes behind those that have not; 0 is never.
    late_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request that now belongs to the caller, with the log of what was generated before."""

    spec: RequestSpec
    own_at: int
    arrived_ms: int
    logs: tuple[bytes, ...]
    endings: tuple[Ending | None, ...]
    prio: str = INTERACTIVE
    prompt_log: bytes = b""  # log-probabilities of the prompt, as far as they are written
    rank: int = 0  # its place among the waiting: microseconds
    attempts: int = 1  # times taken, this one included
    lost_decoders: int = 0  # decoders that were lost while they computed something of it
    content: str = ""  # the weights to run it with (`Hello.content` in hex): if it has begun, the same as before
    numerics: str = ""  # those that it has begun in (`LogEvent.numerics`)
    is_exact: bool = True  # whether its logs are promised to be those of an undisturbed run


@dataclass(frozen=True, slots=True)
class Places:
    """What decoders with the same weights can begin with: requests, and tokens of prompts, media and expected outputs;
    the first request is taken even if it has more.
    """

    content: str  # `Hello.content` in hex; empty where it is not known
    max_requests: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Append:
    """What one step adds to the log of one choice: `records` from index `start` on, and its ending if it has one.
    `origin`: what computed them.
    """

    request_id: str
    choice: int
    start: int
    stride: int
    records: bytes
    ending: Ending | None = None
    origin: Origin = UNKNOWN


class AppendCode(IntEnum):
    """What became of an `Append`."""

    OK = 0
    REFUSED = 1  # no longer the owner: drop the sequence, never retry
    CANCEL = 2  # written, and the client has cancelled
    GAP = 3  # the log is shorter than `start`: send again from the length


@dataclass(frozen=True, slots=True)
class AppendAnswer:
    """The code and the number of records in the log now."""

    code: AppendCode
    length: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """The other schedulers and when their leases end, with the time on Redis's clock (ms)."""

    now_ms: int
    others: dict[str, float]


@dataclass(frozen=True, slots=True)
class RequestLog:
    """What Redis knows of a request: its head (the spec without prompt and media), each choice's records and ending."""

    head: RequestSpec
    state: str
    prompt_tokens: int
    arrived_ms: int
    records: tuple[bytes, ...]
    endings: tuple[Ending | None, ...]


@dataclass(frozen=True, slots=True)
class LogDelta:
    """What the log of one choice holds from some index on."""

    records: bytes
    ending: Ending | None
    content: str = ""  # the weights that the request has begun with
    numerics: str = ""  # the numerics that it has begun in
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class RequestState:
    """Where a request stands. Times are ms of Redis TIME, 0 for what has not happened yet."""

    head: RequestSpec
    state: str  # "queued", "running" or "ended"
    owner: str  # the scheduler that runs it, or ""
    arrived_ms: int
    taken_ms: int  # for the first time
    first_token_ms: int
    ended_ms: int
    prompt_tokens: int
    tokens: tuple[int, ...]  # of each choice
    endings: tuple[Ending | None, ...]
    cancel: bool
    attempts: int  # times taken
    content: str = ""  # the weights that it has begun with, in hex
    is_exact: bool = True  # whether its logs are promised to be those of an undisturbed run


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """What a process knows of a request, to put it back where Redis has lost it.

    An owner gives `own_at`, `rank`, `prio` and `arrived_ms` as it took them. A gateway gives what it passed to `admit`
    and got back; `rank` 0 stands for the rank of its arrival.
    """

    spec: RequestSpec  # whole, with prompt and media
    logs: tuple[bytes, ...]  # of each choice: all records
    endings: tuple[Ending | None, ...]
    own_at: int = 0
    arrived_ms: int = 0
    prio: str = INTERACTIVE
    rank: int = 0
    prompt_log: bytes = b""
    lost_decoders: int = 0  # as an owner knows them; the larger number counts
    content: str = ""  # the weights that the logs were computed with, where that is known
    numerics: str = ""  # the numerics that the logs were begun in, where they are known
    is_exact: bool = (
        True  # False where it is known that the logs need not be those of an undisturbed run
    )
    idempotency_key: str = ""  # where the spec has not been through `admit`
    follow_ms: int = 30_000  # that it lives on without a follower; at least the spec's keep_ms


def cost_of(spec: RequestSpec) -> int:
    """Tokens that a request counts against the limits: its prompt and the most it may generate."""
    outputs = max(spec.sampling.best_of, spec.sampling.n, 1)
    return len(spec.prompt) // 4 + outputs * spec.sampling.max_tokens
