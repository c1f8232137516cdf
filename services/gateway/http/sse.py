"""Answers onto the wire: streams of events, and whole bodies."""

from collections.abc import Sequence

from services.gateway.api.openai.replies import (
    DONE,
    EventWriter,
    event_writers,
    whole_body,
    whole_body_of_all,
)
from services.gateway.following.answer import Answer, Piece
from services.gateway.http.exchange import Exchange
from shared.net import tasks


async def write_stream(exchange: Exchange, answer: Answer, *, with_ids: bool) -> None:
    """Server-sent events until `[DONE]`, each with its id if wanted. Accepted requests only: the
    head of the response goes out first.
    """
    writer = EventWriter(answer, with_ids=with_ids)
    await exchange.start_stream(has_ids=with_ids)
    begun = answer.prompt_scores is not None
    if begun and (chunk := writer.first()):
        await exchange.write(chunk)
    while True:
        pieces = await answer.next()
        chunk = b""
        if not begun and answer.prompt_scores is not None:
            begun, chunk = True, writer.first()
        chunk += b"".join([writer.piece(piece) for piece in pieces])
        if answer.ended:
            answer.close()
            await exchange.end_stream(chunk + writer.usage() + DONE)
            return
        if chunk:
            await exchange.write(chunk)
        elif not pieces:
            await exchange.ping()


async def write_streams(exchange: Exchange, answers: Sequence[Answer], *, with_ids: bool) -> None:
    """The events of several prompts as they come, until `[DONE]`. If one fails, all end with its
    error.
    """
    writers = event_writers(answers, with_ids=with_ids)
    await exchange.start_stream(has_ids=with_ids)

    async def write(answer: Answer, writer: EventWriter) -> None:
        begun = answer.prompt_scores is not None
        chunk = writer.first() if begun else b""
        while not answer.ended:
            if chunk:
                await exchange.write(chunk)
            pieces = await answer.next()
            chunk = b""
            if not begun and answer.prompt_scores is not None:
                begun, chunk = True, writer.first()
            chunk += b"".join([writer.piece(piece) for piece in pieces])
            if not chunk and not pieces:
                await exchange.ping()
        answer.close()
        await exchange.write(chunk)

    await tasks.together(map(write, answers, writers))
    await exchange.end_stream(writers[0].usage() + DONE)


async def write_whole(exchange: Exchange, answer: Answer) -> None:
    """One JSON body at the end."""
    pieces = await _all_pieces(answer)
    await exchange.respond(200, whole_body(answer, pieces))


async def write_wholes(exchange: Exchange, answers: Sequence[Answer]) -> None:
    """One JSON body for several prompts."""
    found = await tasks.together(map(_all_pieces, answers))
    await exchange.respond(200, whole_body_of_all(answers, found))


async def _all_pieces(answer: Answer) -> list[Piece]:
    pieces: list[Piece] = []
    while not answer.ended:
        pieces += await answer.next()
    answer.close()
    return pieces
