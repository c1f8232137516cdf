"""Deliberate faults, to see that the invariants catch them. None of them exists in production code."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import services.scheduler.core.blocks
import services.scheduler.core.state
from services.scheduler.core.blocks import extend_hashes
from services.scheduler.core.budget import Capacity, Parts
from services.scheduler.core.sequence import Sequence
from shared.block_hash import root_name
from shared.queue.scripts import source
from tests.simulation.redis.scripts import replaced


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Inside, one thing is wrong."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            stack.enter_context(PLANTED[name]())
        yield


def _in_script(name: str, right: str, wrong: str) -> contextlib.AbstractContextManager[object]:
    text = source(name)
    assert text.count(right) == 1, f"{name}.lua has no such line: {right}"
    return mock.patch.dict(replaced, {name: text.replace(right, wrong).encode()})


def _append_without_owner_check() -> contextlib.AbstractContextManager[object]:
    return _in_script("append", "if f[1] ~= sid then", "if false then")


def _take_ignores_recovery() -> contextlib.AbstractContextManager[object]:
    return _in_script(
        "take", "if redis.call('EXISTS', P .. ':recovery') == 1 then", "if false then"
    )


def _hash_over_an_uncommitted_token() -> contextlib.AbstractContextManager[object]:
    """A block is named when its last token is still in flight, whatever that turns out to be."""

    def extend(sequence: Sequence, capacity: Capacity) -> None:
        if len(sequence.tokens) % capacity.block_size == capacity.block_size - 1:
            sequence.tokens.append(1)
            extend_hashes(sequence, capacity)
            sequence.tokens.pop()
        else:
            extend_hashes(sequence, capacity)

    return mock.patch.object(services.scheduler.core.state, "extend_hashes", extend)


def _prefixes_are_found_under_any_salt() -> contextlib.AbstractContextManager[object]:
    block_hash = services.scheduler.core.blocks

    def root_of(sequence: Sequence, capacity: Capacity) -> bytes:
        return root_name(capacity.block_size, sequence.lora_id, b"")

    return mock.patch.object(block_hash, "root_of", root_of)


def _what_must_be_whole_is_divided() -> contextlib.AbstractContextManager[object]:
    def chunk(parts: Parts, sequence: Sequence, start: int, most: int) -> int:
        return most

    return mock.patch.object(Parts, "chunk", chunk)


PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "append-without-owner-check": _append_without_owner_check,
    "take-ignores-recovery": _take_ignores_recovery,
    "prefixes-are-found-under-any-salt": _prefixes_are_found_under_any_salt,
    "what-must-be-whole-is-divided": _what_must_be_whole_is_divided,
    "hash-over-an-uncommitted-token": _hash_over_an_uncommitted_token,
}
