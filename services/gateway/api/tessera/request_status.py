"""The state of a request, as REST and gRPC report it."""

import json
from typing import Any

from services.gateway.api.error_object import error_object
from services.gateway.endings import FINISH_NAMES, failure_of
from shared.queue import RequestState
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.gateway.v1.chat_pb2 import ChoiceStatus, RequestStatus
from tessera.scheduler.v1.queue_pb2 import ReplyFormat


def status_message(state: RequestState) -> RequestStatus:
    """For gRPC."""
    head = state.head
    counts = _shown_counts(state)
    return RequestStatus(
        request_id=head.request_id,
        model=head.model,
        status=_status(state),
        arrived_ms=state.arrived_ms,
        taken_ms=state.taken_ms,
        first_token_ms=state.first_token_ms,
        ended_ms=state.ended_ms,
        prompt_tokens=state.prompt_tokens,
        completion_tokens=sum(counts),
        attempts=state.attempts,
        content=state.content,
        exact=state.is_exact,
        choices=[
            ChoiceStatus(
                tokens=count,
                reason=ending.reason if ending else FinishReason.FINISH_REASON_UNSPECIFIED,
                failure=failure_of(ending, head.reply).to_failure()
                if ending and ending.HasField("failure")
                else None,
            )
            for count, ending in zip(counts, state.endings, strict=True)
        ],
    )


def status_body(state: RequestState) -> bytes:
    """For REST."""
    head, counts = state.head, _shown_counts(state)
    content = {
        "id": head.request_id,
        "object": "request",
        "model": head.model,
        "created": head.created_unix_s,
        "status": _status(state),
        # Milliseconds since the epoch by the queue's clock.
        "timeline": {
            "arrived_ms": state.arrived_ms,
            "taken_ms": state.taken_ms or None,
            "first_token_ms": state.first_token_ms or None,
            "ended_ms": state.ended_ms or None,
        },
        "attempts": state.attempts,
        "content": state.content or None,
        "exact": state.is_exact,
        "usage": {
            "prompt_tokens": state.prompt_tokens,
            "completion_tokens": sum(counts),
            "total_tokens": state.prompt_tokens + sum(counts),
        },
        "choices": [
            {"index": index, "tokens": count, **_end(ending, head.reply)}
            for index, (count, ending) in enumerate(zip(counts, state.endings, strict=True))
        ],
    }
    return json.dumps(content, ensure_ascii=False).encode()


def _end(ending: Ending | None, reply: ReplyFormat) -> dict[str, Any]:
    if ending is None:
        return {"finish_reason": None}
    end: dict[str, Any] = {"finish_reason": FINISH_NAMES.get(ending.reason, "error")}
    if ending.HasField("failure"):
        end["error"] = error_object(failure_of(ending, reply))
    return end


def _shown_counts(state: RequestState) -> list[int]:
    """Tokens of each choice; a prompt that is only scored has none."""
    return [0 if state.head.reply.prompt_only else count for count in state.tokens]


def _status(state: RequestState) -> str:
    if state.state != "ended":
        return "cancelling" if state.cancel else state.state
    reasons = {ending.reason for ending in state.endings if ending is not None}
    if FinishReason.FINISH_REASON_ERROR in reasons:
        return "failed"
    return "cancelled" if FinishReason.FINISH_REASON_CANCELLED in reasons else "completed"
