"""What streams of server-sent events have in common: their Content-Type, comments as pings, and ids."""

from services.gateway.following.answer import Answer, Piece
from services.gateway.following.event_id import FINISH_SENT, OPEN, EventIds

MEDIA_TYPE = b"text/event-stream; charset=utf-8"
# A comment between events. Behind an id no empty line may follow it: that would end an event, and
# clients that remember the last id (the `openai` library) would take it for one without data.
# Without ids it is written as events are, since readers that split streams at empty lines would
# glue it to the next event.
COMMENT_BESIDE_IDS = b": ping\n"
COMMENT = b": ping\n\n"
# Readers that strip each piece which they receive (`vllm bench serve`) lose the empty line of a
# comment that came alone: what follows brings another one.
AFTER_COMMENT = b":\n\n"


class EventStream:
    """The part of a writer of server-sent events that does not depend on what they say."""

    media_type = MEDIA_TYPE

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        """`with_ids`: events have ids, from which the stream can be resumed."""
        self._ids = EventIds(answer.head.request_id, answer.progress) if with_ids else None
        self.ping = COMMENT_BESIDE_IDS if with_ids else COMMENT
        self.after_ping = b"" if with_ids else AFTER_COMMENT

    def place(self, piece: Piece, count: int | None = None) -> bytes:
        """The line of the id of an event that ends with the piece, or with the choice's first `count` tokens."""
        if self._ids is None:
            return b""
        is_last = piece.ending is not None and count in (None, piece.count)
        at = piece.count if count is None else count
        self._ids.go_on(piece.choice, at, FINISH_SENT if is_last else OPEN)
        return b"id: %s\n" % self._ids.current().encode()
