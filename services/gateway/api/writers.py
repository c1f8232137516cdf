"""Which writer writes an answer: the one of the form that its request came in by, at any gateway."""

from collections.abc import Mapping

from services.gateway.api.endpoint import MakeWriter, Writer
from services.gateway.api.openai.replies import ReplyWriter
from services.gateway.following.answer import Answer
from shared.errors import Unavailable
from tessera.scheduler.v1.queue_pb2 import ReplyKind

WRITERS: Mapping[int, MakeWriter] = {
    ReplyKind.REPLY_KIND_CHAT: ReplyWriter,
    ReplyKind.REPLY_KIND_COMPLETION: ReplyWriter,
}


def make_writer(answer: Answer, with_ids: bool) -> Writer:
    """The writer of an answer. Raises Unavailable for a kind of reply that only newer gateways know."""
    make = WRITERS.get(answer.head.reply.kind)
    if make is None:
        raise Unavailable(
            "UNKNOWN_REPLY_KIND",
            "this gateway does not know the form of this reply: resume at another gateway",
        )
    return make(answer, with_ids)
