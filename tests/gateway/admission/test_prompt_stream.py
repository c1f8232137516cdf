"""Short prompts of one gateway to one preprocess replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tokenizers import Tokenizer

from services.gateway.admission.prompt_stream import PromptStream
from services.gateway.reading.short_prompts import is_short
from shared.errors import Expired, InvalidRequest, Unavailable
from shared.net.channels import open_channel
from shared.queue.token_log import decode_tokens
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    Media,
    Message,
    Part,
    PrepareRequest,
)
from tests.support.gateway.neighbours import PreprocessPlayer
from tests.support.gateway.stage import MODEL


@asynccontextmanager
async def stream_to(player: PreprocessPlayer, **options: float) -> AsyncIterator[PromptStream]:
    channel = open_channel(player.address)
    stream = PromptStream(channel, "the player", **options)
    try:
        yield stream
    finally:
        await stream.close()
        await channel.close()


@pytest.fixture
async def player(redis_url: str, tokenizer: Tokenizer) -> AsyncIterator[PreprocessPlayer]:
    async with PreprocessPlayer(redis_url, MODEL, tokenizer) as playing:
        yield playing


def ask(words: str) -> PrepareRequest:
    return PrepareRequest(text=words)


async def test_each_gets_its_own_answer(player: PreprocessPlayer, tokenizer: Tokenizer) -> None:
    async with stream_to(player) as stream:
        words = [f"the {'red ' * n}circle" for n in range(1, 40)]
        answers = await asyncio.gather(*(stream.prepare(ask(w), 20) for w in words))
    ids = [decode_tokens(answer.token_ids) for answer in answers]
    assert ids == [tokenizer.encode(w).ids for w in words]


async def test_a_bad_prompt_costs_itself_alone(player: PreprocessPlayer) -> None:
    async with stream_to(player) as stream:
        bad = PrepareRequest(text="red circle", max_prompt_tokens=1)
        results = await asyncio.gather(
            stream.prepare(ask("red"), 20),
            stream.prepare(bad, 20),
            stream.prepare(ask("blue"), 20),
            return_exceptions=True,
        )
    assert isinstance(results[1], InvalidRequest)
    assert results[1].metadata["field"] == "messages"
    assert not isinstance(results[0], BaseException) and not isinstance(results[2], BaseException)


async def test_a_caller_that_leaves_or_times_out_affects_no_other(player: PreprocessPlayer) -> None:
    async with stream_to(player) as stream:
        player.gate.clear()
        leaving = asyncio.create_task(stream.prepare(ask("red"), 20))
        with pytest.raises(Expired):
            await stream.prepare(ask("green"), 0.05)
        staying = asyncio.create_task(stream.prepare(ask("blue"), 20))
        await asyncio.sleep(0.05)
        leaving.cancel()
        player.gate.set()
        assert decode_tokens((await staying).token_ids)


async def test_a_stream_that_ended_meanwhile_is_begun_again(player: PreprocessPlayer) -> None:
    async with stream_to(player) as stream:
        await stream.prepare(ask("red"), 20)
        assert stream._call is not None
        stream._call.cancel()
        assert decode_tokens((await stream.prepare(ask("red"), 20)).token_ids)


async def test_an_old_stream_is_not_used_again(player: PreprocessPlayer) -> None:
    async with stream_to(player, renew_s=0.0) as stream:
        await stream.prepare(ask("red"), 20)
        first = stream._call
        await stream.prepare(ask("red"), 20)
        assert stream._call is not first


async def test_a_dead_replica_is_said_to_be_away(player: PreprocessPlayer) -> None:
    async with stream_to(player) as stream:
        await stream.prepare(ask("red"), 20)
        player.gate.clear()
        waiting = [asyncio.create_task(stream.prepare(ask("red"), 20)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await player.server.grpc.stop(0)
        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(answer, Unavailable)


async def test_closing_fails_all_waiting_prompts(player: PreprocessPlayer) -> None:
    async with stream_to(player) as stream:
        player.gate.clear()
        waiting = [asyncio.create_task(stream.prepare(ask("red"), 20)) for _ in range(2)]
        await asyncio.sleep(0.05)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unavailable, Unavailable]
    player.gate.set()


def test_pictures_and_long_texts_go_alone() -> None:
    seen = Part(media=Media(url="http://a/b.png"))
    words = Part(text="hi")
    pictured = Conversation(messages=[Message(content=[words]), Message(content=[words, seen])])
    assert not is_short(PrepareRequest(conversation=pictured))
    assert not is_short(ask("word " * 10_000))
    assert is_short(PrepareRequest(conversation=Conversation(messages=[Message(content=[words])])))
