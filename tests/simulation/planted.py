"""Deliberate faults, to see that the invariants catch them. None of them exists in production code."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import services.scheduler.core.blocks
import services.scheduler.core.state
from services.scheduler.core.sequence import Sequence
from shared.block_hash import root_name
from tests.simulation import scripts
from tests.simulation.scripts import append, take
from tests.simulation.scripts.prelude import Prelude, Reply


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Inside, one thing is wrong."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            stack.enter_context(PLANTED[name]())
        yield


def _append_without_owner_check() -> contextlib.AbstractContextManager[object]:
    def run(lua: Prelude) -> Reply:
        call, sid = lua.call, lua.ARGV[1]

        def lying(command: str, *words: str | int | float) -> Reply:
            reply = call(command, *words)
            if command == "HMGET" and words[1:3] == ("owner", "cancel"):
                reply[0] = sid
            return reply

        lua.call = lying  # type: ignore[method-assign]
        return append.run(lua)

    return mock.patch.dict(scripts.replaced, append=run)


def _take_ignores_hold() -> contextlib.AbstractContextManager[object]:
    def run(lua: Prelude) -> Reply:
        call = lua.call

        def lying(command: str, *words: str | int | float) -> Reply:
            if command == "EXISTS" and str(words[0]).endswith(":recovery"):
                return 0
            return call(command, *words)

        lua.call = lying  # type: ignore[method-assign]
        return take.run(lua)

    return mock.patch.dict(scripts.replaced, take=run)


def _hash_over_an_uncommitted_token() -> contextlib.AbstractContextManager[object]:
    """A block is named when its last token is still in flight, whatever that turns out to be."""
    real = services.scheduler.core.state.extend_hashes

    def extend(sequence: Sequence, block_size: int) -> None:
        if len(sequence.tokens) % block_size == block_size - 1:
            sequence.tokens.append(1)
            real(sequence, block_size)
            sequence.tokens.pop()
        else:
            real(sequence, block_size)

    return mock.patch.object(services.scheduler.core.state, "extend_hashes", extend)


def _prefixes_are_found_under_any_salt() -> contextlib.AbstractContextManager[object]:
    block_hash = services.scheduler.core.blocks

    def root_of(sequence: Sequence, block_size: int) -> bytes:
        return root_name(block_size, sequence.lora_id, b"")

    return mock.patch.object(block_hash, "root_of", root_of)


PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "append-without-owner-check": _append_without_owner_check,
    "take-ignores-hold": _take_ignores_hold,
    "prefixes-are-found-under-any-salt": _prefixes_are_found_under_any_salt,
    "hash-over-an-uncommitted-token": _hash_over_an_uncommitted_token,
}
