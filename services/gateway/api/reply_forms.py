"""The forms of replies of all APIs, by the kind of reply that a request asks for: any gateway writes an answer in the
form that its request came in by.
"""

from collections.abc import Mapping, Sequence

from services.gateway.following.answer import Answer
from services.gateway.http.endpoint import ReplyForm, StreamWriter
from shared.errors import Precondition, Unavailable
from tessera.scheduler.v1.queue_pb2 import ReplyKind


class ReplyForms:
    """By `ReplyKind`."""

    def __init__(self, forms: Sequence[Mapping[int, ReplyForm]]) -> None:
        """`forms` are those of each API. Raises ValueError for a kind that two of them have."""
        self._forms: dict[int, ReplyForm] = {}
        for of_api in forms:
            if twice := self._forms.keys() & of_api.keys():
                raise ValueError(f"two APIs have the reply kinds {sorted(twice)}")
            self._forms |= of_api

    @property
    def id_prefixes(self) -> Sequence[str]:
        """What stands before a request's id in the ids of replies."""
        return sorted({form.id_prefix for form in self._forms.values() if form.id_prefix})

    def make_writer(self, answer: Answer, with_ids: bool) -> StreamWriter:
        """The writer of an answer. Raises Unavailable for a kind of reply that only newer gateways know, Precondition
        for one that is no stream.
        """
        if answer.head.reply.kind == ReplyKind.REPLY_KIND_POOLED:
            raise Precondition(
                "NOT_A_STREAM",
                "the reply is made of vectors or scores, and none is a stream: ask again",
            )
        form = self._forms.get(answer.head.reply.kind)
        if form is None:
            raise Unavailable(
                "UNKNOWN_REPLY_KIND",
                "this gateway does not know the form of this reply: resume at another gateway",
            )
        return form.make_writer(answer, with_ids)
