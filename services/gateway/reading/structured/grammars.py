"""The grammars of requests: compiled in confined processes, two at a time, and kept by the digest of what was asked."""

import asyncio
import contextlib
import hashlib
import marshal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from services.gateway.model.served_model import ServedModel
from services.gateway.reading.structured.constraint import LONGEST, Constraint
from services.gateway.reading.valid_request import ValidRequest
from shared.confinement.processes import ConfinedProcesses, JobLimit, Work
from shared.errors import InvalidRequest, ServingError

_MEMORY_BYTES = 256 << 20
_PROCESSOR_S = 2
_THREADS = 2
_KEPT_BYTES = 16 << 20
# What is kept of an entry beside its text.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar, or why there is none."""

    grammar: str
    reason: str = ""
    at: str = ""
    message: str = ""


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
        )
        self._processes = ConfinedProcesses(work)
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._lock = threading.Lock()
        self._kept: LRUCache[bytes, _Compiled] = LRUCache(_KEPT_BYTES, _size)

    def close(self) -> None:
        """Ends the processes; who waits for a grammar gets Unavailable."""
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def compile_for(self, request: ValidRequest) -> None:
        """Gives a request the grammar of its form, if it has one.

        Raises InvalidRequest naming the field and, within it, the keyword; Unavailable where no process can be had.
        """
        constraint = request.constraint
        if constraint is None:
            return
        job = self._job(constraint)
        key = hashlib.sha256(marshal.dumps(job)).digest()
        found = self._known(key)
        if found is None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, self._compile, key, job)
        if found.reason:
            raise _refusal(constraint, found)
        request.sampling.grammar = found.grammar

    def _job(self, constraint: Constraint) -> dict[str, Any]:
        return {
            "kind": constraint.kind,
            "json": constraint.json,
            "closed": constraint.closed,
            "lenient": constraint.lenient,
            "whitespace": constraint.whitespace,
            "with_space": self._with_space,
            "added_tokens": self._added_tokens() if constraint.kind == "structural_tag" else {},
        }

    def _added_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    def _known(self, key: bytes) -> _Compiled | None:
        with self._lock:
            return self._kept.get(key)

    def _compile(self, key: bytes, job: dict[str, Any]) -> _Compiled:
        """In a thread. Another may have compiled it while it waited."""
        if (known := self._known(key)) is not None:
            return known
        try:
            answer, grammar = self._processes.ask(job)
        except JobLimit as limit:
            return _too_complex(f"cannot be compiled: it {limit}; nest less, repeat less")
        compiled = _Compiled(
            grammar, answer.get("reason", ""), answer.get("at", ""), answer.get("message", "")
        )
        if len(grammar.encode()) > LONGEST:
            compiled = _too_complex(
                f"makes a grammar of more than {LONGEST >> 10} KiB: ask for less"
            )
        with self._lock, contextlib.suppress(ValueError):  # larger than all that is kept
            self._kept[key] = compiled
        return compiled


def _too_complex(message: str) -> _Compiled:
    return _Compiled("", "GRAMMAR_TOO_COMPLEX", message=message)


def _size(compiled: _Compiled) -> int:
    return len(compiled.grammar) + len(compiled.message) + len(compiled.at) + _ENTRY_BYTES


def _refusal(constraint: Constraint, found: _Compiled) -> ServingError:
    field = constraint.field + found.at
    return InvalidRequest(found.reason, f"{field}: {found.message}", field=field)
