"""The window of a request: how many tokens its prompt stays below."""

from services.preprocess.prompt.builder import Draft, PromptBuilder
from services.preprocess.prompt.history import FIELD, History, exceeded
from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest


class Window:
    """`default` is that of conversations whose requests name none; 0 is no window."""

    def __init__(self, default: int = 0) -> None:
        self._default = default

    def of(self, request: PrepareRequest) -> int:
        """The request's window; 0 for none. Raises InvalidRequest beside a truncation."""
        if request.HasField("max_window_size"):
            if request.max_window_size and request.keep_last_tokens:
                field = "truncate_prompt_tokens"
                raise InvalidRequest(
                    "BAD_TRUNCATION", f"{field} cannot be combined with {FIELD}", field=field
                )
            return request.max_window_size
        return self._default if is_chat(request) and not request.keep_last_tokens else 0

    def history(self, builder: PromptBuilder, request: PrepareRequest) -> History | None:
        """The turns of a conversation that has a window; None for any other prompt."""
        size = self.of(request)
        return History(builder, request, size) if size and is_chat(request) else None

    def check(self, request: PrepareRequest, tokens: int) -> None:
        """Raises InvalidRequest for a prompt of so many tokens that its window has no place for."""
        size = self.of(request)
        if size and tokens >= size:
            raise exceeded("the prompt has", tokens, size)

    def text_draft(self, builder: PromptBuilder, request: PrepareRequest) -> Draft:
        """The draft of a prompt without media. Raises InvalidRequest."""
        history = self.history(builder, request)
        if history is not None:
            return history.prompt(history.most(0, len(history)))
        draft = builder.draft(request)
        self.check(request, len(draft.ids))
        return draft


def is_chat(request: PrepareRequest) -> bool:
    """Whether the prompt is a conversation with turns."""
    is_conversation = request.WhichOneof("input") == "conversation"
    return is_conversation and not request.conversation.as_prompt
