"""A conversation that has to fit into a window of tokens: its system messages and the newest of its turns."""

from collections.abc import Callable, Sequence

from services.families.family import ItemSize
from services.preprocess.prompt.builder import Draft, PromptBuilder
from shared.errors import InvalidRequest
from shared.prompts.length_text import LENGTH_EXCEEDED
from tessera.preprocess.v1.preprocess_pb2 import Conversation, PrepareRequest

FIELD = "max_window_size"
_SYSTEM = ("system", "developer")
# Characters for each token of the window, up to which a whole conversation is tried first.
_SMALL = 8


class History:
    """The prompts of a conversation's newest turns. A turn is a user's message with all that follows it up to the next
    one: the answer, or calls with their results. System messages at the beginning are in every prompt.
    """

    def __init__(self, builder: PromptBuilder, request: PrepareRequest, window: int) -> None:
        """A prompt has less than `window` tokens."""
        self._builder, self._request, self._window = builder, request, window
        self._head, self._starts = _divide(request.conversation)
        self._media = [  # the message of each item
            index
            for index, message in enumerate(request.conversation.messages)
            for part in message.content
            if part.WhichOneof("part") in ("media", "video")
        ]
        texts = (part.text for m in request.conversation.messages for part in m.content)
        self._is_small = sum(map(len, texts)) <= _SMALL * window
        self._drafts: dict[int, Draft | None] = {}

    def __len__(self) -> int:
        """How many turns there are, at least one."""
        return len(self._starts)

    def messages(self, turns: int) -> Sequence[int]:
        """The indices of the messages that the newest `turns` turns leave."""
        start = self._starts[-turns]
        return [*range(self._head), *range(start, len(self._request.conversation.messages))]

    def media(self, turns: int) -> Sequence[int]:
        """The numbers of the media in those messages, among all media of the conversation."""
        start = self._starts[-turns]
        return [n for n, index in enumerate(self._media) if index < self._head or index >= start]

    def most(self, low: int, high: int, items: Sequence[ItemSize] = ()) -> int:
        """The largest number of turns in [low, high] whose prompt fits; `low` turns are known to fit. Without `items`,
        the media of all of them, each item counts as its marker: as no more than it takes.
        """
        if low < high and self._is_small and self.fits(high, items):  # as most do
            return high
        return _largest(lambda turns: self.fits(turns, items), low, high)

    def fits(self, turns: int, items: Sequence[ItemSize] = ()) -> bool:
        """Whether the prompt of the newest `turns` turns has less tokens than the window. `items`: see `most`."""
        draft = self._draft(turns)
        return draft is not None and self._tokens(draft, items) < self._window

    def prompt(self, turns: int, items: Sequence[ItemSize] = ()) -> Draft:
        """The draft of turns that fit; for none of them the error that names the window."""
        if turns:
            draft = self._draft(turns)
            assert draft is not None, "it was found to fit"
            return draft
        newest = self._builder.draft(self._request, self.messages(1))
        tokens = self._tokens(newest, items)
        raise exceeded("the newest turn and the system message take", tokens, self._window)

    def _draft(self, turns: int) -> Draft | None:
        """None for one that is longer than the model."""
        if turns not in self._drafts:
            try:
                draft = self._builder.draft(self._request, self.messages(turns))
            except InvalidRequest as error:
                if error.reason != LENGTH_EXCEEDED:
                    raise
                draft = None
            self._drafts[turns] = draft
        return self._drafts[turns]

    def _tokens(self, draft: Draft, items: Sequence[ItemSize]) -> int:
        return len(self._builder.expand(draft, items).ids)


def exceeded(what: str, tokens: int, window: int) -> InvalidRequest:
    """The error about a prompt that the window has no place for."""
    return InvalidRequest(
        "WINDOW_EXCEEDED",
        f"{FIELD}: {what} {tokens} tokens, and the prompt must have less than {window}: shorten it, or raise {FIELD}",
        field=FIELD,
        tokens=str(tokens),
        limit=str(window - 1),
    )


def _divide(conversation: Conversation) -> tuple[int, list[int]]:
    """How many system messages begin it, and where its turns begin."""
    roles = [message.role for message in conversation.messages]
    head = next((i for i, role in enumerate(roles) if role not in _SYSTEM), len(roles))
    starts = [i for i in range(head, len(roles)) if i == head or roles[i] == "user"]
    return head, starts or [head]


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in [low, high] that fits, where all below it do: steps that double, then halves. What is tried
    is at most about twice as large as what is found.
    """
    step = 1
    while low < high:
        tried = min(low + step, high) if step else (low + high + 1) // 2
        if fits(tried):
            low, step = tried, step * 2
        else:
            high, step = tried - 1, 0
    return low
