"""The grammars of requests: compiled in confined processes, two at a time, and kept by the digest of what was asked."""

import asyncio
import contextlib
import contextvars
import hashlib
import marshal
import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from services.gateway.model.served_model import ServedModel
from services.gateway.reading.constraint import LONGEST, Constraint
from services.gateway.reading.valid_request import ValidRequest
from shared.confinement.processes import ConfinedProcesses
from shared.confinement.work import JobLimit, Work
from shared.environment import monotonic
from shared.errors import Expired, InvalidRequest, Overloaded, ServingError, Unavailable

_MEMORY_BYTES = 256 << 20
_PROCESSOR_S = 2
# More than the longest grammar that is taken, so that a longer one is told from a broken process.
_ANSWER_BYTES = 16 << 20
_THREADS = 2
_KEPT_BYTES = 16 << 20
# Of a form that took too much time: on a machine that is less busy it may not.
_SLOW_KEPT_S = 60.0
_MOST_WAITING = 256
# What is kept of an entry beside its text.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar, or why there is none."""

    grammar: str
    reason: str = ""
    at: str = ""
    message: str = ""
    is_of_calls: bool = False
    field: str = ""  # of the request, where the form says it itself
    until: float = math.inf  # not known after this time


@dataclass(slots=True)
class _Flight:
    """A grammar that is being compiled, and how many requests wait for it."""

    future: Future[_Compiled]
    waiting: int = 0


class Grammars:
    """Compiles the forms of requests. Their processes start with the first one."""

    def __init__(self, model: ServedModel) -> None:
        self._with_space = model.table.leading_spaces_stripped > 0
        self._tokenizer = model.tokenizer
        work = Work(
            "services.gateway.reading.structured.worker",
            "grammars",
            "GRAMMAR_PROCESS",
            _MEMORY_BYTES,
            _PROCESSOR_S,
            _ANSWER_BYTES,
        )
        self._processes = ConfinedProcesses(work)
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        # Of what is known and what is under way.
        self._lock = threading.Lock()
        self._flights: dict[bytes, _Flight] = {}
        self._waiting = 0
        self._kept: LRUCache[bytes, _Compiled] = LRUCache(_KEPT_BYTES, _size)

    def close(self) -> None:
        """Ends the processes; who waits for a grammar gets Unavailable."""
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def compile_for(self, request: ValidRequest, timeout_ms: int = 0) -> None:
        """Gives a request the grammar of its form, if it has one, within so many milliseconds; 0 is without a limit.

        Raises InvalidRequest naming the field and, within it, the keyword; Unavailable where no process can be had,
        Overloaded where too many wait, Expired.
        """
        constraint = request.constraint
        if constraint is None:
            return
        job = self._job(constraint)
        key = hashlib.sha256(marshal.dumps(job)).digest()
        found = self._known(key)
        if found is None:
            try:
                async with asyncio.timeout(timeout_ms / 1000 if timeout_ms else None):
                    found = await self._once(key, job)
            except TimeoutError:
                raise Expired(
                    "GRAMMAR_TIMEOUT",
                    f"{constraint.field}: was not compiled within the request's timeouts; retry later",
                    field=constraint.field,
                ) from None
        if found.reason:
            raise _refusal(constraint, found)
        request.sampling.grammar = found.grammar

    async def _once(self, key: bytes, job: dict[str, Any]) -> _Compiled:
        """Compiles a form, or waits for it with others that ask for the same. One for which nobody waits any more is
        not begun.
        """
        if self._waiting >= _MOST_WAITING:
            raise Overloaded(
                "TOO_MANY_GRAMMARS",
                f"{_MOST_WAITING} requests wait for their schemas or grammars to be compiled: retry in a moment",
                retry_after_s="1",
            )
        flight = self._flight(key, job)
        flight.waiting += 1
        self._waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(flight.future))
        except asyncio.CancelledError:
            if flight.future.cancelled():  # by `close`: a waiter that leaves cancels it below
                raise Unavailable(
                    "SHUTTING_DOWN", "this service is stopping; retry elsewhere"
                ) from None
            raise
        finally:
            self._waiting -= 1
            flight.waiting -= 1
            if not flight.waiting:
                flight.future.cancel()

    def _flight(self, key: bytes, job: dict[str, Any]) -> _Flight:
        with self._lock:
            flight = self._flights.get(key)
        if flight is None:
            context = contextvars.copy_context()  # for its clock
            flight = _Flight(self._threads.submit(context.run, self._compile, key, job))
            with self._lock:
                self._flights[key] = flight
            flight.future.add_done_callback(lambda _: self._landed(key))
        return flight

    def _landed(self, key: bytes) -> None:
        """In any thread."""
        with self._lock:
            del self._flights[key]

    def _job(self, constraint: Constraint) -> dict[str, Any]:
        calls = constraint.calls
        has_tags = constraint.kind == "structural_tag" or calls is not None
        return {
            "kind": constraint.kind,
            **_form(constraint),
            "calls": None if calls is None else _form(calls),
            "with_space": self._with_space,
            "added_tokens": self._added_tokens() if has_tags else {},
        }

    def _added_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    def _known(self, key: bytes) -> _Compiled | None:
        with self._lock:
            found = self._kept.get(key)
        return found if found is not None and monotonic() < found.until else None

    def _compile(self, key: bytes, job: dict[str, Any]) -> _Compiled:
        """In a thread. Another may have compiled it while it waited."""
        if (known := self._known(key)) is not None:
            return known
        compiled = self._answer(job)
        with self._lock, contextlib.suppress(ValueError):  # larger than all that is kept
            self._kept[key] = compiled
        return compiled

    def _answer(self, job: dict[str, Any]) -> _Compiled:
        try:
            answer, grammar = self._processes.ask(job)
        except JobLimit as limit:
            until = monotonic() + _SLOW_KEPT_S if limit.is_time else math.inf
            return _too_complex(f"cannot be compiled: it {limit}; nest less, repeat less", until)
        if len(grammar.encode()) > LONGEST:
            return _too_complex(f"makes a grammar of more than {LONGEST >> 10} KiB: ask for less")
        return _Compiled(
            grammar,
            answer.get("reason", ""),
            answer.get("at", ""),
            answer.get("message", ""),
            answer.get("is_of_calls", False),
            answer.get("field", ""),
        )


def _too_complex(message: str, until: float = math.inf) -> _Compiled:
    return _Compiled("", "GRAMMAR_TOO_COMPLEX", message=message, until=until)


def _size(compiled: _Compiled) -> int:
    return len(compiled.grammar) + len(compiled.message) + len(compiled.at) + _ENTRY_BYTES


def _form(constraint: Constraint) -> dict[str, Any]:
    return {
        "json": constraint.json,
        "closed": constraint.closed,
        "lenient": constraint.lenient,
        "whitespace": constraint.whitespace,
    }


def _refusal(constraint: Constraint, found: _Compiled) -> ServingError:
    of_calls = constraint.calls if found.is_of_calls else None
    field = found.field or (of_calls or constraint).field + found.at
    return InvalidRequest(found.reason, f"{field}: {found.message}", field=field)
