"""The request queue and the token log in Redis: verbs for gateways (reserve, admit, follow, cancel, read), schedulers
(take, append, renew, fence, give back) and for both when Redis has lost something (restore).

Every verb that writes is one script of `shared/queue/scripts/`: it happens as a whole or not at all. All raise
Unavailable when Redis is away or refuses to write.
"""

from redis.asyncio import Redis

from shared.net import transport
from shared.queue.channels import ControlChannel, TokenChannel
from shared.queue.gateway_queue import GatewayVerbs
from shared.queue.messages import (
    Append,
    AppendAnswer,
    AppendCode,
    Lifetimes,
    LogDelta,
    Places,
    Renewal,
    RequestLog,
    RequestSnapshot,
    RequestState,
    TakenRequest,
    cost_of,
)
from shared.queue.recovery import RecoveryVerbs
from shared.queue.scheduler_queue import SchedulerVerbs

__all__ = [
    "Append",
    "AppendAnswer",
    "AppendCode",
    "ControlChannel",
    "Lifetimes",
    "LogDelta",
    "Places",
    "Queue",
    "Renewal",
    "RequestLog",
    "RequestSnapshot",
    "RequestState",
    "TakenRequest",
    "TokenChannel",
    "connect",
    "cost_of",
]


class Queue(GatewayVerbs, SchedulerVerbs, RecoveryVerbs):
    """All the verbs, on one Redis client."""


def connect(url: str) -> Redis:
    """A Redis client for scripts and logs. Values are bytes; connects at the first command."""
    return transport.redis(url, socket_connect_timeout=2, health_check_interval=0)
