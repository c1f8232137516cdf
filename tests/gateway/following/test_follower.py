"""Following the log: what is lost on the channel is read, what comes twice is trimmed, what changed
ends the stream.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gateway.api.openai.replies import ReplyWriter
from services.gateway.following.answer import Answer, AnswerFold
from services.gateway.following.choice_log import ChoiceLog, LogLayout
from services.gateway.following.follower import Follow, Follower
from services.gateway.telemetry.metrics.metrics import Metrics
from shared.errors import Internal, NotFound
from shared.queue import Append, Places, Queue, TokenChannel, connect
from shared.queue.keys import Keys, new_request_id
from shared.queue.token_log import encode_tokens, stride
from shared.text.stop_search import StopStrings
from shared.text.text_fold import TokenBytes
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import (
    LogBatch,
    LogEvent,
    ReplyFormat,
    ReplyKind,
    RequestSpec,
)
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse
from tests.support.gateway.stage import ANSWER, MODEL, Stage
from tests.support.queue.records import logprob_record

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

    async def begin(self, n: int = 1, layout: LogLayout | None = None) -> Follow:
        spec = RequestSpec(
            request_id=self.rid,
            model=MODEL,
            prompt=encode_tokens([1]),
            sampling=SamplingParams(n=n),
        )
        layout = layout or LogLayout(choices=n)
        follow = self.follower.follow(self.rid, new=True, layout=layout)
        await self.queue.reserve(self.rid, cost=9, max_requests=9, max_tokens=999)
        await self.queue.admit(spec, cost=9)
        follow.admitted = True
        await self.queue.renew("s", GetLoadResponse(), register=True, tokens_per_s=None)
        await self.queue.take("s", [Places("", 9, 999)])
        return follow

    async def append(
        self, start: int, tokens: list[int], ending: Ending | None = None, *, choice: int = 0
    ) -> None:
        append = Append(self.rid, choice, start, 4, encode_tokens(tokens), ending)
        await self.queue.append("s", [append])

    async def append_prompt(self, start: int, records: bytes, *, lost: bool) -> None:
        """A part of the prompt's log-probabilities."""
        await self.redis.append(self.keys.log(self.rid, -1), records)
        event = LogEvent(request_id=self.rid, choice=-1, start=start, records=records)
        if not lost:
            batch = LogBatch(events=[event]).SerializeToString()
            await self.redis.publish(self.keys.token_channel, batch)

    async def lose(
        self, tokens: list[int], ending: Ending | None = None, *, choice: int = 0
    ) -> None:
        """Writes to the log without a message on the channel."""
        await self.redis.append(self.keys.log(self.rid, choice), encode_tokens(tokens))
        if ending is not None:
            field = f"e{choice}"
            await self.redis.hset(self.keys.request(self.rid), field, ending.SerializeToString())


@pytest.fixture
async def bench(redis_url: str) -> AsyncIterator[Bench]:
    made = Bench(redis_url)
    async with made.follower:
        await asyncio.sleep(0.05)  # until it has subscribed
        yield made
    await made.redis.aclose()


async def all_of(follow: Follow, choice: int = 0) -> list[int]:
    """The tokens of one choice until it ends; what others say meanwhile is dropped."""
    tokens: list[int] = []
    async with asyncio.timeout(60):
        while follow.choices[choice].ending is None:
            tokens += await next_of(follow, choice)
    return tokens + (await next_of(follow, choice) if follow._fresh else [])


async def next_of(follow: Follow, choice: int = 0) -> list[int]:
    """The tokens of one choice in the next deltas."""
    return [t for delta in await follow.next() if delta.choice == choice for t in delta.tokens]


async def test_tokens_come_in_order_with_the_ending(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1, 2])
    await bench.append(2, [3], STOP)
    assert await all_of(follow) == [1, 2, 3]
    assert follow.choices[0].ending == STOP


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
    ending = follow.choices[0].ending
    assert ending is not None
    assert ending.reason == FinishReason.FINISH_REASON_CANCELLED


def test_overlaps_are_trimmed() -> None:
    log = ChoiceLog(0, 4)
    assert log.offer(0, encode_tokens([1, 2]), None, whole=False)
    assert log.offer(0, encode_tokens([1, 2, 3]), None, whole=False)
    assert not log.offer(1, encode_tokens([2]), None, whole=False)
    assert log.take().tokens == [1, 2, 3]
    assert not log.offer(5, encode_tokens([9]), None, whole=False)
    assert log.needs_read and log.tokens == [1, 2, 3]


def test_records_with_log_probabilities_are_trimmed_to_whole_ones() -> None:
    size = stride(1)
    records = b"".join(logprob_record(t, [t, 9], [-0.5, -t]) for t in range(1, 5))
    log = ChoiceLog(0, size)
    log.offer(0, records[: 2 * size], None, whole=False)
    log.offer(1, records[size : 3 * size + 5], None, whole=True)
    delta = log.take()
    assert delta.tokens == [1, 2, 3] and delta.records == records[: 3 * size]
    log.offer(2, records[2 * size :], STOP, whole=False)
    delta = log.take()
    assert delta.tokens == [4] and delta.records == records[3 * size :] and delta.ending == STOP


async def test_another_history_ends_the_stream(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1, 2])
    assert await next_of(follow) == [1, 2]
    event = LogEvent(request_id=bench.rid, start=1, records=encode_tokens([7, 8]))
    follow.offer(follow.choices[0], event)
    with pytest.raises(Internal) as caught:
        await follow.next()
    assert caught.value.reason == "STREAM_DIVERGED"


async def test_choices_are_followed_side_by_side(bench: Bench) -> None:
    follow = await bench.begin(n=3)
    await bench.append(0, [5], choice=2)
    await bench.append(0, [1], choice=0)
    await bench.append(0, [3], choice=1)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    await bench.append(1, [], STOP, choice=0)
    await bench.lose([4], STOP, choice=1)
    await bench.append(1, [6], STOP, choice=2)
    async with asyncio.timeout(60):
        while follow.open_logs:
            for delta in await follow.next():
                seen[delta.choice] += delta.tokens
    assert seen == {0: [1], 1: [3, 4], 2: [5, 6]}


async def test_a_follower_that_comes_late_reads_every_choice(bench: Bench) -> None:
    await bench.begin(n=2)
    await bench.append(0, [1, 2], STOP, choice=1)
    await bench.append(0, [3], choice=0)
    layout = LogLayout(choices=2)
    follow = bench.follower.follow(bench.rid, new=False, layout=layout)
    seen = {0: [0], 1: [0]}
    async with asyncio.timeout(60):
        while seen != {0: [0, 3], 1: [0, 1, 2]}:
            for delta in await follow.next():
                seen[delta.choice] += delta.tokens
    assert [log.choice for log in follow.open_logs] == [0]


@pytest.mark.parametrize("lost", [False, True])
async def test_output_waits_for_the_whole_prompt(bench: Bench, lost: bool) -> None:
    layout = LogLayout(prompt_records=2, prompt_stride=stride(0))
    follow = await bench.begin(layout=layout)
    first, second = (logprob_record(t, [t], [-1.0]) for t in (1, 2))
    await bench.append_prompt(0, first, lost=False)
    if lost:
        await bench.append_prompt(1, second, lost=True)
        await bench.append(0, [7])
    else:
        await bench.append_prompt(1, second, lost=False)
        await bench.append(0, [7])
    seen: list[tuple[int, list[int]]] = []
    async with asyncio.timeout(60):
        while len(seen) < 2:
            seen += [(delta.choice, delta.tokens) for delta in await follow.next()]
    assert seen == [(-1, [1, 2]), (0, [7])]


async def test_output_without_its_prompt_is_an_error(bench: Bench) -> None:
    follow = await bench.begin(layout=LogLayout(prompt_records=2, prompt_stride=stride(0)))
    await bench.append(0, [7])
    with pytest.raises(Internal) as caught:
        await asyncio.wait_for(follow.next(), 60)
    assert caught.value.reason == "PROMPT_LOGPROBS_LOST"


async def test_a_request_that_breaks_off_does_not_wait_for_its_prompt(bench: Bench) -> None:
    follow = await bench.begin(layout=LogLayout(prompt_records=2, prompt_stride=stride(0)))
    failed = Ending(reason=FinishReason.FINISH_REASON_ERROR)
    await bench.append(0, [], failed)
    (delta,) = await asyncio.wait_for(follow.next(), 60)
    assert delta.ending == failed


async def test_a_request_that_is_gone_is_not_waited_for(bench: Bench) -> None:
    follow = bench.follower.follow(bench.rid, new=False)
    with pytest.raises(NotFound):
        await asyncio.wait_for(follow.next(), 60)


async def test_the_channel_is_subscribed_again_after_redis_closed_it(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1])
    assert await next_of(follow) == [1]
    await bench.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await bench.append(1, [2])
    await bench.append(2, [3], STOP)
    assert await all_of(follow) == [2, 3]


async def test_a_log_that_came_back_shorter_is_waited_for_and_compared(bench: Bench) -> None:
    follow = await bench.begin()
    await bench.append(0, [1, 2, 3])
    assert await next_of(follow) == [1, 2, 3]
    log = bench.keys.log(bench.rid, 0)
    await bench.redis.set(log, encode_tokens([1]))
    await bench.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await asyncio.sleep(0.3)
    await bench.append(1, [2, 3, 4])
    await bench.append(4, [5], STOP)
    assert await all_of(follow) == [4, 5]


@pytest.mark.parametrize("history", [[1, 9], [1, 9, 3], [1, 9, 3, 4]])
async def test_a_log_that_came_back_with_another_history_ends_the_stream(
    bench: Bench, history: list[int]
) -> None:
    follow = await bench.begin()
    await bench.append(0, [1, 2, 3])
    assert await next_of(follow) == [1, 2, 3]
    await bench.redis.set(bench.keys.log(bench.rid, 0), encode_tokens(history))
    await bench.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await asyncio.sleep(0.3)
    await bench.append(len(history), [5])  # said on the channel, but not believed
    with pytest.raises(Internal) as caught:
        await asyncio.wait_for(all_of(follow), 60)
    assert caught.value.reason == "STREAM_DIVERGED"


def answer_of(head: RequestSpec, table: TokenBytes) -> Answer:
    """An answer to write events of; nothing is followed."""
    return Answer(
        head,
        len(head.prompt) // 4,
        table,
        Follow(None, "r"),  # type: ignore[arg-type]
        Metrics(MODEL, 512),
        own_eos_ids=(),
        prompt_ids=None,
        arrived_at=0.0,
        leave=lambda: False,
    )


def chunks(start: int, tokens: list[int], sizes: list[int]) -> bytes:
    """What a gateway writes for a whole log after `start` silent tokens, in steps of these sizes."""
    head = RequestSpec(
        request_id="r_x",
        model=MODEL,
        sampling=SamplingParams(stop=["zz", "xyz"], n=1),
        reply=ReplyFormat(kind=ReplyKind.REPLY_KIND_CHAT, include_usage=True),
    )
    fold = AnswerFold(LETTERS, head, StopStrings(head.sampling.stop))
    writer = ReplyWriter(answer_of(head, LETTERS), with_ids=True)
    fold.push(tokens[:start], None)
    written, at = b"", start
    for size in sizes:
        part = tokens[at : at + size]
        at += len(part)
        if part:
            written += writer.piece(fold.push(part, None))
    return written + writer.piece(fold.push(tokens[at:], STOP))


def test_an_ending_that_is_read_twice_is_returned_once() -> None:
    log = ChoiceLog(0, stride(None))
    assert log.offer(0, encode_tokens([1, 2]), STOP, whole=True)
    assert log.take().ending == STOP
    assert not log.offer(1, encode_tokens([2]), STOP, whole=True)
    assert not log.offer(2, b"", STOP, whole=True)


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
    first = asyncio.create_task(stage.chat(with_ids=True, stream=True, stop=["square"]))
    played = await stage.scheduler.taken()
    other = Bench(redis_url)
    async with other.follower:
        follow = other.follower.follow(played.spec.request_id, new=False)
        go.set()
        tokens = await all_of(follow)
    fold = AnswerFold(stage.gateway.model.table, played.spec, StopStrings(["square"]))
    writer = ReplyWriter(answer_of(played.spec, stage.gateway.model.table), with_ids=True)
    written = "".join(writer.first()).encode()
    for token in tokens[:-1]:
        written += writer.piece(fold.push([token], None))
    written += writer.piece(fold.push(tokens[-1:], follow.choices[0].ending))
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
