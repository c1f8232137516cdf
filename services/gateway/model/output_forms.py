"""How the served model writes calls and reasoning, and which of its tokens mark them."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import Unavailable
from shared.output_format.detect import find_calls, find_reasoning
from shared.output_format.markers import TokenMarkers
from shared.output_format.table import FORMATS, REASONING, OutputFormat, ReasoningFormat
from shared.text.tokenizer_file import TokenizerFile
from tessera.scheduler.v1.queue_pb2 import MessageFormat


@dataclass(frozen=True, slots=True)
class Form:
    """What one answer is divided by. `special`: markers that are special tokens."""

    calls: OutputFormat | None
    reasoning: ReasoningFormat | None
    markers: TokenMarkers
    special: frozenset[str]


class OutputForms:
    """Of one model: `calls` and `reasoning` are the forms of its own answers."""

    def __init__(
        self,
        added: Mapping[str, int],
        special: frozenset[str] = frozenset(),
        calls: OutputFormat | None = None,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        """`added`: the ids of the tokenizer's added tokens by their text, `special` those of them that are special."""
        self.calls = calls
        self.reasoning = reasoning
        self.added = added
        self._special = special
        self._known: dict[tuple[str, str], Form] = {}

    @classmethod
    def find(
        cls, words: TokenizerFile, template: str | None, calls: str, reasoning: str
    ) -> "OutputForms":
        """By `--tool-call-parser` and `--reasoning-parser`. Raises InvalidRequest for a name of no form."""
        special = frozenset(
            token["content"] for token in words.content["added_tokens"] if token["special"]
        )
        return cls(
            words.ids(), special, find_calls(calls, template), find_reasoning(reasoning, template)
        )

    def of(self, message: MessageFormat) -> Form:
        """What an answer is divided by. Raises Unavailable for a form that only newer gateways know."""
        names = (message.calls, message.reasoning)
        if names not in self._known:
            self._known[names] = self._form(*names)
        return self._known[names]

    def _form(self, calls_name: str, reasoning_name: str) -> Form:
        calls, reasoning = FORMATS.get(calls_name), REASONING.get(reasoning_name)
        if (calls_name and calls is None) or (reasoning_name and reasoning is None):
            raise Unavailable(
                "UNKNOWN_OUTPUT_FORMAT",
                "this gateway does not know the form of this answer: resume at another gateway",
            )
        markers = calls.markers() if calls is not None else ()
        if reasoning is not None:
            markers += (reasoning.open, reasoning.close)
        return Form(calls, reasoning, TokenMarkers(self.added, markers), self._special)
