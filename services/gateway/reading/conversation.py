"""A conversation's messages and template settings, whichever API they came by."""

from collections.abc import Sequence

from services.gateway.decoding.bounds import at_most, wrong
from services.gateway.decoding.list_limits import MOST_MESSAGES, MOST_PARTS
from services.gateway.model.served_model import ServedModel
from shared.prompts.roles import SERVED, for_older_templates
from tessera.preprocess.v1.preprocess_pb2 import Conversation

# Tokens that a chat template may add for each message, far on the safe side.
TEMPLATE_TOKENS = 64


def check_sizes(parts_of_messages: Sequence[int]) -> None:
    """Checks how many messages there are, and parts in all. Raises InvalidRequest naming the list, or the first part
    that is too many."""
    if not parts_of_messages:
        raise wrong(
            "messages",
            "must be a list of at least one message; a prompt without roles goes to completions",
        )
    at_most("messages", len(parts_of_messages), MOST_MESSAGES)
    left = MOST_PARTS
    for index, count in enumerate(parts_of_messages):
        if count > left:
            raise wrong(
                f"messages[{index}].content[{left}]",
                f"is too many: all messages together must not hold more than {MOST_PARTS} parts",
            )
        left -= count


def read_role(role: str | None, path: str) -> str:
    """The role that templates know for that of the message at `path`. Raises InvalidRequest."""
    if role not in SERVED:
        names = ", ".join(SERVED)
        if role is None:
            raise wrong(f"{path}.role", f"is missing: it must be one of {names}")
        more = ': its newer name is "tool"' if role == "function" else ""
        raise wrong(f"{path}.role", f"must be one of {names}, not {role[:32]!r}{more}")
    return for_older_templates(role)


def conversation_bound(conversation: Conversation, model: ServedModel) -> int:
    """An upper bound of the tokens of a conversation: one for each byte of text; a picture may fill
    the model's length.
    """
    bound = len(conversation.chat_template_kwargs_json) + TEMPLATE_TOKENS
    bound += len(conversation.tools_json.encode()) + len(conversation.documents_json.encode())
    for message in conversation.messages:
        bound += TEMPLATE_TOKENS + len(message.tool_call_id) + len(message.reasoning.encode())
        bound += len(message.tool_calls_json.encode())
        for part in message.content:
            is_text = part.WhichOneof("part") == "text"
            bound += len(part.text.encode()) if is_text else model.max_model_len
    return bound
