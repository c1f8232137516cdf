"""Following the log: what is lost on the channel is read, what comes twice is trimmed, what changed
ends the stream.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.gateway_stage import ANSWER, MODEL, Stage
from tokenizers import Tokenizer

from services.gateway.answer import AnswerFold
from services.gateway.follower import Follow, Follower
from services.gateway.openai_replies import EventWriter
from shared.errors import Internal, NotFound
from shared.keys import Keys, new_request_id
from shared.queue import Append, Queue, TokenChannel, connect
from shared.text import TokenBytes
from shared.token_log import encode_tokens
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind, RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

STOP = Ending(reason=FinishReason.FINISH_REASON_STOP)
LETTERS = TokenBytes([bytes([97 + i]) for i in range(26)])


class Bench:
    """A request in a real queue, written by an owner and followed by a follower."""

    def __init__(self, url: str) -> None:
        self.redis = connect(url)
        self.keys = Keys(MODEL)
        self.queue = Queue(self.redis, self.keys)
        self.follower = Follower(self.queue, TokenChannel(self.redis, self.keys))
        self.rid = new_request_id(self.keys.tag)

    async def begin(self) -> Follow:
        spec = RequestSpec(
            request_id=self.rid, model=MODEL, prompt=encode_tokens([1]), sampling={"n": 1}
        )
        follow = self.follower.follow(self.rid, new=True)
        await self.queue.door(self.rid, cost=9, max_requests=9, max_tokens=999)
        await self.queue.admit(spec, cost=9)
        follow.admitted = True
        await self.queue.renew("s", GetLoadResponse(), register=True, tokens_per_s=None)
        await self.queue.take("s", max_requests=9, max_tokens=999)
        return follow

    async def append(self, start: int, tokens: list[int], ending: Ending | None = None) -> None:
        await self.queue.append("s", [Append(self.rid, 0, start, 4, encode_tokens(tokens), ending)])

    async def lose(self, tokens: list[int], ending: Ending | None = None) -> None:
        """Writes to the log without a message on the channel."""
        await self.redis.append(self.keys.log(self.rid, 0), encode_tokens(tokens))
        if ending is not None:
            await self.redis.hset(self.keys.request(self.rid), "e0", ending.SerializeToString())


@pytest.fixture
async def bench(redis_url: str) -> AsyncIterator[Bench]:
    made = Bench(redis_url)
    async with made.follower:
        await asyncio.sleep(0.05)  # until it has subscribed
        yield made
    await made.redis.aclose()


async def all_of(follow: Follow) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(8):
        while follow.ending is None:
            tokens += await follow.next()
    return tokens + (await follow.next())


async def test_tokens_come_in_order_with_the_ending(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1, 2])
    await bench.append(2, [3], STOP)
    assert await all_of(follow) == [1, 2, 3]
    assert follow.ending == STOP


async def test_a_lost_message_is_read_when_the_next_shows_a_gap(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1])
    await bench.lose([2, 3])
    await bench.append(3, [4], STOP)
    assert await all_of(follow) == [1, 2, 3, 4]


async def test_a_lost_last_message_costs_a_second(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1])
    await bench.lose([2], STOP)
    assert await all_of(follow) == [1, 2]


async def test_a_cancel_by_script_ends_it_with_all_tokens(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1])
    await bench.lose([2])
    await bench.queue.cancel(bench.rid)
    await bench.queue.give_back("s", [bench.rid])
    assert await all_of(follow) == [1, 2]
    assert follow.ending is not None
    assert follow.ending.reason == FinishReason.FINISH_REASON_CANCELLED


async def test_overlaps_are_trimmed() -> None:
    follow = Follow(None, "r")  # type: ignore[arg-type]
    follow.offer(0, encode_tokens([1, 2]), None, whole=False)
    follow.offer(0, encode_tokens([1, 2, 3]), None, whole=False)
    follow.offer(1, encode_tokens([2]), None, whole=False)
    assert await follow.next() == [1, 2, 3]
    follow.offer(5, encode_tokens([9]), None, whole=False)
    assert follow.needs_read and follow.tokens == [1, 2, 3]


async def test_another_history_ends_the_stream() -> None:
    follow = Follow(None, "r")  # type: ignore[arg-type]
    follow.offer(0, encode_tokens([1, 2]), None, whole=False)
    assert await follow.next() == [1, 2]
    follow.offer(1, encode_tokens([7, 8]), None, whole=False)
    with pytest.raises(Internal) as caught:
        await follow.next()
    assert caught.value.reason == "STREAM_DIVERGED"


async def test_a_request_that_is_gone_is_not_waited_for(bench: Bench) -> None:
    follow = bench.follower.follow(bench.rid, new=False)
    with pytest.raises(NotFound):
        await asyncio.wait_for(follow.next(), 5)


async def test_the_channel_is_subscribed_again_after_redis_closed_it(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1])
    assert await follow.next() == [1]
    await bench.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await bench.append(1, [2])
    await bench.append(2, [3], STOP)
    assert await all_of(follow) == [2, 3]


def chunks(start: int, tokens: list[int], sizes: list[int]) -> bytes:
    """What a gateway writes for a whole log after `start` silent tokens, in steps of these sizes."""
    head = RequestSpec(
        request_id="r_x",
        model=MODEL,
        sampling=SamplingParams(stop=["zz", "xyz"]),
        reply=ReplyFormat(kind=ReplyKind.REPLY_KIND_CHAT, include_usage=True),
    )
    fold, writer = AnswerFold(LETTERS, head), EventWriter(head, 3)
    fold.push(tokens[:start], None)
    written, at = b"", start
    for size in sizes:
        part = tokens[at : at + size]
        at += len(part)
        if part:
            written += writer.piece(fold.push(part, None))
    return written + writer.piece(fold.push(tokens[at:], STOP))


def test_events_after_a_token_depend_on_the_tokens_alone() -> None:
    tokens = [0, 1, 25, 2, 23, 24, 3, 25]
    whole = chunks(0, tokens, [1] * 8)
    for start in range(len(tokens)):
        rest = chunks(start, tokens, [1] * 8)
        assert whole.endswith(rest)


async def test_two_gateways_give_the_same_bytes(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, stage: Stage
) -> None:
    go = asyncio.Event()

    async def wait(rid: str, index: int) -> None:
        if index == 4:
            await go.wait()

    stage.scheduler.step = wait
    first = asyncio.create_task(stage.chat(stream=True, stop=["square"]))
    played = await stage.scheduler.taken()
    other = Bench(redis_url)
    async with other.follower:
        follow = other.follower.follow(played.spec.request_id, new=False)
        go.set()
        tokens = await all_of(follow)
    fold = AnswerFold(stage.gateway.model.table, played.spec)
    writer = EventWriter(played.spec, len(played.spec.prompt) // 4)
    written = writer.first()
    for token in tokens[:-1]:
        written += writer.piece(fold.push([token], None))
    written += writer.piece(fold.push(tokens[-1:], follow.ending))
    seen = (await first).content.removesuffix(b"data: [DONE]\n\n")
    assert ANSWER.startswith(_text(seen)) and not _text(seen).endswith("square")
    assert _text(seen) == _text(written)
    # Tokens that waited together share an event; each event stands in both with the same id.
    assert set(_ids(seen)) <= set(_ids(written))
    assert seen.split(b"\n\n")[-2] == written.split(b"\n\n")[-2]
    await other.redis.aclose()


def _ids(events: bytes) -> list[bytes]:
    return [line for line in events.split(b"\n") if line.startswith(b"id: ")]


def _text(events: bytes) -> str:
    data = [json.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: {")]
    return "".join(d["choices"][0]["delta"].get("content", "") for d in data)
