"""Lines of the files that a batch writes."""

import json

from services.gateway.api.batches.schema import Problem
from services.gateway.http.inner_calls import InnerReply
from shared.errors import ServingError

# What many readers of text, Python's among them, take for the end of a line too, and how JSON writes it otherwise.
_LINE_ENDS = {
    character.encode(): f"\\u{ord(character):04x}".encode()
    for character in ("\u0085", "\u2028", "\u2029")
}


def answered(batch_id: str, line: int, custom_id: str, reply: InnerReply) -> bytes:
    """A request that was answered, also by an error."""
    # Line ends between values would divide the line.
    body = reply.body.replace(b"\n", b" ")
    head = f'{{"id":"{_name(batch_id, line)}","custom_id":{json.dumps(custom_id)},"response":{{'
    status = f'"status_code":{reply.status},"request_id":"{reply.request_id}","body":'
    return _in_one_line(head.encode() + status.encode() + body + b'},"error":null}')


def unanswered(batch_id: str, line: int, custom_id: str | None, code: str, message: str) -> bytes:
    """A line without an answer: what is wrong with it, or why it was not sent."""
    content = {
        "id": _name(batch_id, line),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return _in_one_line(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode())


def problem_of(error: ServingError, line: int | None = None) -> Problem:
    """The same for the batch itself."""
    return Problem(
        code=error.reason.lower(),
        message=error.message,
        param=error.metadata.get("field"),
        line=line,
    )


def _name(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_id.partition('_')[2]}_{line}"


def _in_one_line(result: bytes) -> bytes:
    for written, escaped in _LINE_ENDS.items():
        result = result.replace(written, escaped)
    return result
