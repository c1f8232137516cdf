"""Which prompts are short: those go to preprocess together with others (`admission/prompt_stream.py`)."""

from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest

_LONGEST_BYTES = 16 << 10  # a longer one would let those behind it wait


def is_short(request: PrepareRequest) -> bool:
    """Whether a prompt goes with others: text alone, and not much of it."""
    if request.mindie_ids or request.shm_name_save_path:
        return False
    parts = (part for message in request.conversation.messages for part in message.content)
    return all(part.WhichOneof("part") == "text" for part in parts) and (
        request.ByteSize() <= _LONGEST_BYTES
    )
