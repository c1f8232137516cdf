"""Time and random numbers, as all services read them: the process's own, unless `use` has given others, as a simulation
of many processes on virtual time does.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Environment:
    """Where time and random numbers come from: seconds, seconds since 1970, and so many random bytes."""

    monotonic: Callable[[], float] = time.monotonic
    unix_time: Callable[[], float] = time.time
    random_bytes: Callable[[int], bytes] = secrets.token_bytes


_SYSTEM = Environment()
_current: ContextVar[Environment] = ContextVar("environment", default=_SYSTEM)


@contextlib.contextmanager
def use(environment: Environment) -> Iterator[None]:
    """Inside, and in tasks that are started inside, everything is read from `environment`."""
    token = _current.set(environment)
    try:
        yield
    finally:
        _current.reset(token)


def monotonic() -> float:
    """Seconds of a clock that only goes forward."""
    return _current.get().monotonic()


def unix_time() -> float:
    """Seconds since 1970."""
    return _current.get().unix_time()


def random_bytes(count: int) -> bytes:
    """Bytes that nobody can guess."""
    return _current.get().random_bytes(count)


def random_hex(num_bytes: int) -> str:
    """A name that nobody can guess, two characters for each byte."""
    return random_bytes(num_bytes).hex()
