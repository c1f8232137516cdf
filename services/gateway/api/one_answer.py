"""Replies that one answer is written to, as a stream or whole, whatever their API."""

from collections.abc import Callable, Iterator, Sequence

from services.gateway.api.generating import Write
from services.gateway.following.answer import Answer, Outcome
from services.gateway.http.endpoint import MakeWriter
from services.gateway.http.exchange import Exchange
from services.gateway.http.streams import write_stream

# A reply that is not streamed, piece by piece.
Whole = Callable[[Answer, Outcome], Iterator[str]]


def written_by(make_writer: MakeWriter, whole: Whole) -> Write:
    """Writes the reply to one prompt: its events where it is streamed, else `whole` once the answer has ended."""

    async def write(
        exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
    ) -> None:
        [answer] = answers
        if stream:
            await write_stream(exchange, answers, [make_writer(answer, with_ids)])
            return
        [outcome] = await answer.whole()
        await exchange.respond_in_pieces(answer.slices.joined(whole(answer, outcome)))

    return write
