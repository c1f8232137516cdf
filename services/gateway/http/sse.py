"""Streams of events onto the wire."""

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from services.gateway.api.endpoint import Writer
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import Exchange
from shared.net import tasks


async def write_stream(
    exchange: Exchange, answers: Sequence[Answer], writers: Sequence[Writer], *, with_ids: bool
) -> None:
    """Server-sent events of a reply's answers, one for each prompt, as they come. If one fails, all
    end with its error. Accepted requests only: the head of the response goes out first.
    """
    await exchange.start_stream(has_ids=with_ids)
    if len(answers) == 1:
        last = await _write_events(exchange, answers[0], writers[0], contextlib.nullcontext())
        await exchange.end_stream(last + writers[0].end())
        return
    # Held while an event is written in several pieces.
    lock = asyncio.Lock()

    async def write(answer: Answer, writer: Writer) -> None:
        await exchange.write(await _write_events(exchange, answer, writer, lock))

    await tasks.together(map(write, answers, writers))
    await exchange.end_stream(writers[0].end())


async def _write_events(
    exchange: Exchange, answer: Answer, writer: Writer, lock: AbstractAsyncContextManager[None]
) -> bytes:
    """Writes all events of an answer but those of its last pieces, which are returned."""
    begun = answer.prompt_scores is not None
    chunk = await _write_first(exchange, answer, writer, lock) if begun else b""
    while not answer.ended:
        if chunk:
            async with lock:
                await exchange.write(chunk)
        pieces = await answer.next()
        chunk = b""
        if not begun and answer.prompt_scores is not None:
            begun, chunk = True, await _write_first(exchange, answer, writer, lock)
        chunk += b"".join([writer.piece(piece) for piece in pieces])
        if not chunk and not pieces:
            async with lock:
                await exchange.ping()
    answer.close()
    return chunk


async def _write_first(
    exchange: Exchange, answer: Answer, writer: Writer, lock: AbstractAsyncContextManager[None]
) -> bytes:
    """The events before any token: returned if they are small, written if they are large."""
    async with lock:
        pieces = answer.slices.joined(writer.first())
        chunk = await anext(pieces, b"")
        has_more = False
        async for piece in pieces:
            has_more = True
            await exchange.write(chunk)
            chunk = piece
        if not has_more:
            return chunk
        await exchange.write(chunk)
    return b""
