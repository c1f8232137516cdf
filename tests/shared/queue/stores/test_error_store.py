"""The latest errors of all gateways, in a real Redis: few, in their order, and not for long."""

from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.stores.error_store import KEEP_ERRORS_MS, MOST_ERRORS, ErrorStore


async def test_few_errors_are_kept_and_not_for_long(redis_url: str) -> None:
    async with connect(redis_url) as redis:
        store = ErrorStore(redis, Keys("errors"))
        old = [({"number": -1}, KEEP_ERRORS_MS + 1000), ({"number": -2}, KEEP_ERRORS_MS - 5000)]
        await store.add(old)
        now_s, kept = await store.read()
        assert [error.content for error in kept] == [{"number": -2}]
        assert abs(1000 * now_s - kept[0].at_ms - KEEP_ERRORS_MS + 5000) < 2000
        await store.add([({"number": n}, 5000 - 10 * n) for n in range(MOST_ERRORS + 20)])
        _, kept = await store.read()
        assert [error.content["number"] for error in kept] == [*range(MOST_ERRORS + 19, 19, -1)]
        assert 0 < await redis.pttl(Keys("errors").errors) <= KEEP_ERRORS_MS
