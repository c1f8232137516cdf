"""The parts of a grammar, each compiled and checked for itself: a grammar of ours refers to them by name."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.messages import grammar_error, schema_error
from services.gateway.reading.structured.schema_walk import Node
from services.gateway.reading.structured.schemas import prepared
from shared.text.rust_panic import RustPanic, panics_as_errors

# Any text, as a terminal. Tokens that stand for themselves (`Parts.literal`) are none.
TEXT = r"/(.|\n)*/"
# Text of tokenizers that put a space before it, which is taken off again when it is shown.
_SPACE = "/ ?/ "
# Any tokens, that space among them.
_ANY_TOKENS = re.compile(r'[(" ]*<\[[*^]')


@dataclass(frozen=True, slots=True)
class SchemaStyle:
    """How schemas are compiled: the arguments of `schemas.prepared`."""

    closed: bool
    lenient: bool
    whitespace: str | None


@dataclass(slots=True)
class Parts:
    """What a grammar is made of. `start` is its first rule, in which parts stand by the names that the methods give."""

    added_tokens: Mapping[str, int]  # of the tokenizer, by their text
    style: SchemaStyle
    start: str = ""
    rules: list[str] = field(default_factory=list)
    _grammars: list[dict[str, Any]] = field(default_factory=list)

    def json_schema(self, schema: Any, at: str = "") -> str:
        """A JSON value under a schema. Raises FormError, as all do."""
        style = self.style
        if style.whitespace and (message := _check(LLMatcher.grammar_from_regex(style.whitespace))):
            raise FormError(f"the white space between values: {grammar_error(message)}")
        try:
            ready = prepared(
                schema, closed=style.closed, lenient=style.lenient, whitespace=style.whitespace
            )
            if message := _check_schema(ready):
                raise schema_error(message, ready, _check_schema)
        except FormError as error:
            raise FormError(str(error), at + error.at, error.reason) from None
        return self._named({"json_schema": ready})

    def regex(self, expression: Any, at: str = "") -> str:
        """Text that an expression matches from its begin to its end."""
        text = _string(expression, at)
        text = text.removeprefix("^")
        if text.endswith("$") and not text.endswith(r"\$"):
            text = text[:-1]
        return self._lark(json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0], at)

    def grammar(self, text: Any, at: str = "") -> str:
        """Text of a grammar in Lark's form, or in EBNF as llama.cpp has it."""
        given = _string(text, at)
        try:
            lark = any_to_lark(given)
        except RecursionError:
            raise FormError("is nested too deeply", at) from None
        except Exception as error:  # the library raises what its operations do
            raise FormError(f"is neither Lark nor EBNF: {error}"[:400], at) from None
        return self._lark({"lark_grammar": lark}, at)

    def literal(self, text: str) -> str:
        """Exactly this text; tokens that were added to the vocabulary stand for themselves in it."""
        pieces: list[str] = []
        while text:
            found = [(text.find(token), -len(token), token) for token in self.added_tokens]
            place, _, token = min((one for one in found if one[0] >= 0), default=(len(text), 0, ""))
            pieces += [json.dumps(text[:place])] if place else []
            pieces += [f"<[{self.added_tokens[token]}]>"] if token else []
            text = text[place + len(token) :]
        return " ".join(pieces) or '""'

    def first_token(self, text: str) -> str:
        """The added token with which a text begins; empty for none."""
        found = [token for token in self.added_tokens if text.startswith(token)]
        return max(found, key=len, default="")

    def rule(self, body: str, attributes: str = "", *, is_terminal: bool = False) -> str:
        """A rule of its own, or a terminal; its name."""
        name = f"{'TERMINAL' if is_terminal else 'rule'}_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def written(self, *, with_space: bool) -> str:
        """The whole grammar. `with_space`: it may begin with a space."""
        spaced = with_space and not _ANY_TOKENS.match(self.start)
        start = f"{_SPACE}({self.start})" if spaced else self.start
        rules = "\n".join([f"start: {start}", *self.rules])
        is_plain = rules == "start: @part_0"
        grammars = self._grammars if is_plain else [{"lark_grammar": rules}, *self._grammars]
        text = _text(grammars)
        if message := _check(text):
            raise grammar_error(message)
        return text

    def lark(self, text: str) -> str:
        """Text of a grammar in Lark's form."""
        return self._lark({"lark_grammar": text}, "")

    def check_lark(self, text: str, at: str = "") -> None:
        """Raises FormError for what is no grammar in Lark's form."""
        if message := _check(_text([{"lark_grammar": text}])):
            error = grammar_error(message)
            raise FormError(str(error), at, error.reason)

    def _lark(self, grammar: dict[str, Any], at: str) -> str:
        self.check_lark(grammar["lark_grammar"], at)
        return self._named({"lark_grammar": grammar["lark_grammar"]})

    def _named(self, grammar: dict[str, Any]) -> str:
        name = f"part_{len(self._grammars)}"
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str) or not value:
        raise FormError("must be a string of at least one character", at)
    return value


def _check_schema(schema: Node) -> str:
    return _check(_text([{"json_schema": schema}]))


def _check(grammar: str) -> str:
    """What is wrong with it; empty for nothing."""
    try:
        with panics_as_errors():
            is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    except RustPanic:  # such as over text of many bytes a character, which it would show cut off
        return "holds a value that does not belong there, and the library that reads it does not say which"
    return messages[0] if is_error else ""


def _text(grammars: list[dict[str, Any]]) -> str:
    try:
        text = json.dumps({"grammars": grammars}, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError) as error:  # half of a surrogate pair, an infinite number
        raise FormError(f"cannot be written as JSON: {error}") from None
    return text
