"""Answers onto the wire: streams of events, and whole bodies."""

from collections.abc import Sequence

from services.gateway.api.endpoint import Writer
from services.gateway.following.answer import Answer, Piece
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
        last = await _write_events(exchange, answers[0], writers[0])
        await exchange.end_stream(last + writers[0].end())
        return

    async def write(answer: Answer, writer: Writer) -> None:
        await exchange.write(await _write_events(exchange, answer, writer))

    await tasks.together(map(write, answers, writers))
    await exchange.end_stream(writers[0].end())


async def _write_events(exchange: Exchange, answer: Answer, writer: Writer) -> bytes:
    """Writes all events of an answer but those of its last pieces, which are returned."""
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
    return chunk


async def all_pieces(answers: Sequence[Answer]) -> list[list[Piece]]:
    """The pieces of each answer, once all have ended."""
    if len(answers) == 1:
        return [await _pieces(answers[0])]
    return await tasks.together(map(_pieces, answers))


async def _pieces(answer: Answer) -> list[Piece]:
    pieces: list[Piece] = []
    while not answer.ended:
        pieces += await answer.next()
    answer.close()
    return pieces
