"""Lines of OpenAI's batches: what they ask for, and what stands in the files of their results."""

import json
from typing import Any

from services.gateway.api.batch_forms import LineName, LineRequest, in_one_line
from services.gateway.api.batches.schema import Line, LineBody
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.decode import decode
from services.gateway.http.inner_calls import InnerReply
from shared.errors import ServingError
from shared.queue.stores.batch_store import StoredBatch

_LONGEST_NAME = 512  # characters of a custom_id
_WHY = {
    "expired": "the completion window ended before this request was executed",
    "cancelled": "the batch was cancelled before this request was executed",
}


class OpenAILines:
    """The form of `{"custom_id", "method", "url", "body"}`."""

    def read(self, line: bytes, batch: StoredBatch) -> LineRequest:
        """The request of a line. Raises InvalidRequest naming the field."""
        given = decode(line, Line)
        if not given.custom_id:
            raise wrong("custom_id", "is missing")
        if len(given.custom_id) > _LONGEST_NAME:
            raise wrong("custom_id", f"must not be longer than {_LONGEST_NAME} characters")
        if given.method != "POST":
            raise wrong("method", f"must be POST, not {(given.method or '')[:24]!r}")
        if given.url != batch.endpoint:
            shown = (given.url or "")[:64]
            raise wrong("url", f"must be the batch's endpoint {batch.endpoint}, not {shown!r}")
        body = bytes(given.body)
        if not body.startswith(b"{"):
            raise wrong("body", "must be an object")
        asked = decode(body, LineBody)
        if asked.stream:
            raise wrong("body.stream", "must be false: the answers of a batch stand in a file")
        if asked.background:
            raise wrong("body.background", "must be false: a batch waits for its answers itself")
        return LineRequest(given.custom_id, body)

    def answered(self, name: LineName, reply: InnerReply) -> bytes:
        """A request that was answered, also by an error."""
        head = f'{{"id":"{_id(name)}","custom_id":{json.dumps(name.custom_id)},"response":{{'
        status = f'"status_code":{reply.status},"request_id":"{reply.request_id}","body":'
        return in_one_line(head.encode() + status.encode() + reply.body + b'},"error":null}')

    def unanswered(self, name: LineName, error: ServingError) -> bytes:
        """A line without an answer: what is wrong with it."""
        return _without(name, error.reason.lower(), error.message)

    def left(self, name: LineName, outcome: str) -> bytes:
        """Why a line was not sent."""
        return _without(name, f"batch_{outcome}", _WHY[outcome])


def _without(name: LineName, code: str, message: str) -> bytes:
    content: dict[str, Any] = {
        "id": _id(name),
        "custom_id": name.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return in_one_line(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode())


def _id(name: LineName) -> str:
    return f"batch_req_{name.batch_id.partition('_')[2]}_{name.number}"
