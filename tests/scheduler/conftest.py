"""Surroundings for tests of the scheduler process."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.scheduler_bench import Bench
from tests.support.tokenizers import byte_level_tokenizer, save


@pytest.fixture
async def bench(redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    """A Redis and a model folder; what a test starts is stopped at its end."""
    save(byte_level_tokenizer(), tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        bench = Bench(stack, redis_url, tmp_path)
        stack.push_async_callback(bench.redis.aclose)
        yield bench
    assert [what for decoder in bench.decoders for what in decoder.broken] == []
