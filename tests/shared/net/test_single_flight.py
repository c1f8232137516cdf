"""Concurrent calls for one key are one piece of work."""

import asyncio

import pytest

from shared.net.single_flight import SingleFlight


class Work:
    """Counts how often it begins; `finish` lets it return."""

    def __init__(self) -> None:
        self.begun = 0
        self.finish = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        await self.finish.wait()
        return self.begun


@pytest.fixture
def flight() -> SingleFlight[str, int]:
    return SingleFlight()


async def _started(*calls: "asyncio.Task[int]") -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(call.done() for call in calls)


async def test_concurrent_calls_share_one_result(flight: SingleFlight[str, int]) -> None:
    work, other = Work(), Work()
    calls = [asyncio.create_task(flight.run("a", work)) for _ in range(3)]
    others = asyncio.create_task(flight.run("b", other))
    await _started(*calls, others)
    assert len(flight) == 2 and "a" in flight and "c" not in flight
    work.finish.set()
    other.finish.set()
    assert await asyncio.gather(*calls) == [1, 1, 1] and await others == 1
    assert len(flight) == 0
    assert await flight.run("a", work) == 2  # nothing is kept


async def test_a_caller_that_leaves_does_not_end_the_work(flight: SingleFlight[str, int]) -> None:
    work = Work()
    first = asyncio.create_task(flight.run("a", work))
    second = asyncio.create_task(flight.run("a", work))
    await _started(first, second)
    first.cancel()
    await asyncio.wait([first])
    work.finish.set()
    assert await second == 1


async def test_all_callers_get_the_error(flight: SingleFlight[str, int]) -> None:
    async def fail() -> int:
        await asyncio.sleep(0)
        raise KeyError("no")

    calls = [asyncio.create_task(flight.run("a", fail)) for _ in range(2)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [KeyError, KeyError]
    assert len(flight) == 0


async def test_after_cancel_the_next_call_begins_anew(flight: SingleFlight[str, int]) -> None:
    work = Work()
    cancelled = asyncio.create_task(flight.run("a", work))
    await _started(cancelled)
    flight.cancel("a")
    again = asyncio.create_task(flight.run("a", work))
    work.finish.set()
    assert await again == 2
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_close_cancels_everything(flight: SingleFlight[str, int]) -> None:
    work = Work()
    call = asyncio.create_task(flight.run("a", work))
    await _started(call)
    await flight.close()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(flight) == 0
