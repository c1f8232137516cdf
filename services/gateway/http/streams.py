"""Streams of answers onto the wire, whatever their form."""

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from services.gateway.following.answer import Answer
from services.gateway.http.endpoint import StreamWriter
from services.gateway.http.exchange import Exchange
from shared.net import tasks

# Bytes of frames that are written before more are made.
_LARGE = 256 << 10


async def write_stream(
    exchange: Exchange, answers: Sequence[Answer], writers: Sequence[StreamWriter]
) -> None:
    """The frames of a reply's answers, one for each prompt, as they come. If one fails, all end with its error.
    Accepted requests only: the head of the response goes out first. The writers have one form, and the first one ends
    the stream.
    """
    await exchange.start_stream(writers[0])
    if len(answers) == 1:
        last = await _write_frames(exchange, answers[0], writers[0], contextlib.nullcontext())
        await exchange.end_stream(last + writers[0].end())
        return
    # Held while a frame is written in several parts.
    lock = asyncio.Lock()

    async def write(answer: Answer, writer: StreamWriter) -> None:
        await exchange.write(await _write_frames(exchange, answer, writer, lock))

    await tasks.together(map(write, answers, writers))
    await exchange.end_stream(writers[0].end())


async def _write_frames(
    exchange: Exchange,
    answer: Answer,
    writer: StreamWriter,
    lock: AbstractAsyncContextManager[None],
) -> bytes:
    """Writes all frames of an answer but those of its last pieces, which are returned."""
    chunk = writer.accepted()
    begun = answer.prompt_scores is not None
    if begun:
        chunk = await _write_first(exchange, answer, writer, lock, chunk)
    while not answer.ended:
        if chunk:
            async with lock:
                await exchange.write(chunk)
            chunk = b""
        pieces = await answer.next()
        if not begun and answer.prompt_scores is not None:
            begun, chunk = True, await _write_first(exchange, answer, writer, lock, b"")
        if len(pieces) == 1 and not chunk:  # nearly always
            chunk = writer.piece(pieces[0])
            continue
        frames, size = [chunk], len(chunk)
        for piece in pieces:
            frame = writer.piece(piece)
            frames.append(frame)
            size += len(frame)
            if size > _LARGE:
                async with lock:
                    await exchange.write(b"".join(frames))
                frames, size = [], 0
        chunk = b"".join(frames)
        if not chunk and not pieces:
            async with lock:
                await exchange.ping()
    answer.close()
    return chunk


async def _write_first(
    exchange: Exchange,
    answer: Answer,
    writer: StreamWriter,
    lock: AbstractAsyncContextManager[None],
    chunk: bytes,
) -> bytes:
    """What comes before any token, behind `chunk`: returned if it is small, written if it is large."""
    async with lock:
        parts = answer.slices.joined(writer.first())
        chunk += await anext(parts, b"")
        has_more = False
        async for part in parts:
            has_more = True
            await exchange.write(chunk)
            chunk = part
        if not has_more:
            return chunk
        await exchange.write(chunk)
    return b""
