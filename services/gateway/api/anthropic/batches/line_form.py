"""Requests of message batches as they are kept, and their results."""

import json

from services.gateway.api.anthropic.batches.schema import BatchItem, Params
from services.gateway.api.anthropic.errors import error_content
from services.gateway.api.batch_forms import LineName, LineRequest, in_one_line
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.decode import decode
from services.gateway.http.inner_calls import InnerReply
from shared.errors import ServingError
from shared.queue.stores.batch_store import StoredBatch

_LEFT = {"expired": b'{"type":"expired"}', "cancelled": b'{"type":"canceled"}'}


def line_of(item: BatchItem) -> bytes:
    """A request as one line, with its end."""
    head = f'{{"custom_id":{json.dumps(item.custom_id)},"params":'.encode()
    return head + in_one_line(bytes(item.params)) + b"}\n"


class MessageLines:
    """The form of `{"custom_id", "params"}`."""

    def read(self, line: bytes, batch: StoredBatch) -> LineRequest:
        """The request of a line. Raises InvalidRequest naming the field."""
        item = decode(line, BatchItem)
        params = bytes(item.params)
        if decode(params, Params).stream:
            raise wrong(
                "stream", "must be false: the results of a batch are read when it has ended"
            )
        return LineRequest(item.custom_id or "", params)

    def answered(self, name: LineName, reply: InnerReply) -> bytes:
        """A request that was answered, also by an error."""
        kind, field = ("succeeded", "message") if reply.status < 400 else ("errored", "error")
        return _result(name, f'{{"type":"{kind}","{field}":'.encode() + reply.body + b"}")

    def unanswered(self, name: LineName, error: ServingError) -> bytes:
        """A request without an answer: what is wrong with it."""
        said = json.dumps(error_content(error), ensure_ascii=False).encode()
        return _result(name, b'{"type":"errored","error":' + said + b"}")

    def left(self, name: LineName, outcome: str) -> bytes:
        """Why a request was not answered."""
        return _result(name, _LEFT[outcome])


def _result(name: LineName, result: bytes) -> bytes:
    head = f'{{"custom_id":{json.dumps(name.custom_id)},"result":'.encode()
    return in_one_line(head + result + b"}")
