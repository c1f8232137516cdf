"""Forms compiled in the test's own process, and what their grammars accept with a real tokenizer."""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from services.gateway.reading.constraint import Kind
from services.gateway.reading.structured.compiling import compiled
from tests.support.tokenizers import token_id


def compile_form(
    kind: Kind,
    value: Any,
    *,
    closed: bool = True,
    lenient: bool = False,
    whitespace: str | None = None,
    with_space: bool = False,
    added_tokens: Mapping[str, int] | None = None,
    calls: Any = None,
) -> str:
    """The grammar. `calls`: what stands in a structural tag's `format`. Raises FormError."""
    instead = None
    if calls is not None:
        written = json.dumps({"format": calls}).encode()
        instead = {"json": written, "closed": True, "lenient": True, "whitespace": None}
    return compiled(
        {
            "kind": kind,
            "json": json.dumps(value).encode(),
            "closed": closed,
            "lenient": lenient,
            "whitespace": whitespace,
            "calls": instead,
            "with_space": with_space,
            "added_tokens": added_tokens or {},
        }
    )


class Acceptor:
    """Says whether a text is a whole answer under a grammar."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        """`end`: the token that ends an answer."""
        self._tokenizer = tokenizer
        self._end = token_id(tokenizer, end)
        self._library = LLTokenizer(tokenizer.to_str(), eos_token=self._end)

    def accepts(self, grammar: str, text: str) -> bool:
        """Token by token, as the tokenizer cuts the text, by the masks that a decoder has."""
        matcher = LLMatcher(self._library, grammar)
        assert not matcher.is_error(), matcher.get_error()
        for token in [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]:
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            if not mask[token // 8] >> token % 8 & 1:
                return False
            matcher.consume_token(token)
        return True
