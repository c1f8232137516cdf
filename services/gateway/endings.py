"""How choices end."""

from collections.abc import Collection, Mapping

from shared import errors
from shared.errors import ServingError
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import ReplyFormat

# What decoders call the form of an answer.
_GRAMMAR = "grammar"

# A choice that ended otherwise failed, or was cancelled.
COMPLETED = (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)
# In words. A reply that ended in one of the last two has an error instead.
FINISH_NAMES: Mapping[int, str] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_CANCELLED: "cancelled",
    FinishReason.FINISH_REASON_ERROR: "error",
}


def failure_of(ending: Ending, reply: ReplyFormat) -> ServingError:
    """What went wrong with a choice. What a decoder says of the grammar is said of the field that asked for it."""
    error = errors.from_failure(ending.failure)
    if error.metadata.get("field") != _GRAMMAR or not reply.form_field:
        return error
    field = reply.form_field
    message = f"{field}: {error.message.removeprefix(f'{_GRAMMAR}: ')}"
    return type(error)(error.reason, message, **{**error.metadata, "field": field})


def end_name(ending: Ending) -> str:
    """Why a choice that is complete ended, as TGI and MindIE call it."""
    if ending.reason == FinishReason.FINISH_REASON_LENGTH:
        return "length"
    return "stop_sequence" if ending.stop else "eos_token"


def stop_reason(ending: Ending, silent_ends: Collection[int]) -> str | int | None:
    """The stop string or end id that was found; None at the limit and for the ids in `silent_ends`, the
    tokenizer's own end.
    """
    if ending.stop:
        return ending.stop
    if ending.HasField("stop_token_id") and ending.stop_token_id not in silent_ends:
        return ending.stop_token_id
    return None
