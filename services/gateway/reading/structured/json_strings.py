"""Grammars of texts that are written within a string of JSON (`written_text.py`).

Lexers of llguidance take the longest terminal and do not go back. A terminal of a text ends where the next character
cannot go on with it. In what is written for it this may be within an escape, since all of them begin with a backslash.
Where a terminal may go on with an escape, and another one begins with one, the whole grammar becomes one terminal. It
accepts all texts of the grammar, however terminals are cut.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.written_text import (
    Written,
    written_expression,
    written_string,
)

_TOKENS = re.compile(
    r"""
    (?P<skipped> [ \t\r\n]+ | (?:\#|//)[^\n]* )
    | (?P<string> "(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"i? )
    | (?P<expression> /(?:\\.|[^/\\])+/[imslux]* )
    | (?P<import> %import[ \t]+common[ \t]*
        (?:\.[ \t]*[A-Z_]+(?:[ \t]*->[ \t]*[A-Z_][A-Z_0-9]*)?|\([A-Z_,\s]+\)) )
    | (?P<alias> ->[ \t]*[!?]?[A-Za-z_][A-Za-z0-9_\-]* )
    | (?P<name> [!?]*[A-Za-z_][A-Za-z0-9_\-]* )
    | (?P<other> %ignore | \.\. | [+\-]?[0-9]+ | [:,.(){}\[\]|~*+?] )
    """,
    re.VERBOSE | re.DOTALL,
)
_RANGE = re.compile(r"[ \t]*\.\.")
_IMPORTED = re.compile(r"\.\s*([A-Z_]+)(?:\s*->\s*(\w+))?")
# Terminals of Lark's library that hold characters which are escaped; others are written as they are.
_COMMON = {
    "ESCAPED_STRING": r"\"([^\"\\]|\\.)*\"",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+([^\/*][^*]*\*+)*\/",
}
_MOST_PIECES = 4096
_DEEPEST = 64


class _Token(NamedTuple):
    kind: str
    text: str
    written: Written | None = None


@dataclass(slots=True)
class _Lark:
    """A grammar, what is written in the place of its literals. `library`: imports that stay as they are."""

    rules: dict[str, list[_Token]] = field(default_factory=dict)
    terminals: dict[str, list[_Token]] = field(default_factory=dict)
    ignored: list[list[_Token]] = field(default_factory=list)
    library: list[str] = field(default_factory=list)


def in_json_string(lark: str) -> str:
    """The grammar of what is written for the texts of a valid grammar in Lark's form. Raises FormError for one that
    cannot be written, and for what only llguidance has.
    """
    grammar = _read(lark)
    grammar.ignored = [_one_at_a_time(body, grammar) for body in grammar.ignored]
    if not _is_ambiguous(grammar):
        return _text(grammar)
    if grammar.ignored or _is_recursive(grammar):
        raise FormError(
            "is recursive or has %ignore, and terminals in which line ends, tabs, quotes or backslashes stand behind"
            " others; this model writes the input in a JSON string, where these cannot be told apart: let them be"
            " terminals of one character"
        )
    return _as_one_terminal(grammar)


def _read(lark: str) -> _Lark:
    tokens = list(_tokens(lark))
    found = _Lark()
    body: list[_Token] = []
    for place, token in enumerate(tokens):
        if token.kind == "import":
            _take_imports(token.text, found)
        elif token.text == "%ignore":
            body = []
            found.ignored.append(body)
        elif token.kind == "name" and tokens[place + 1 : place + 2] == [_COLON]:
            body = []
            name = token.text.lstrip("!?")
            (found.rules if name.lower() == name else found.terminals)[name] = body
        elif token != _COLON:
            body.append(token)
    return found


_COLON = _Token("other", ":")


def _tokens(lark: str) -> Iterator[_Token]:
    place, before, begin = 0, "", ""
    while place < len(lark):
        match = _TOKENS.match(lark, place)
        text = match[0] if match else lark[place : place + 16]
        if match is None or (text == ":" and before in ("]", ":")):
            raise FormError(f"{text[:16]!r} is not taken in the input of a tool")
        kind, place = str(match.lastgroup), match.end()
        if kind == "skipped":
            continue
        before = text
        if kind == "string" and _RANGE.match(lark, place):
            begin = text
        elif kind == "string" and begin:
            first, last = ord(_value(begin)), ord(_value(text))
            begin = ""
            written = written_expression(rf"[\x{{{first:x}}}-\x{{{last:x}}}]")
            yield _Token(kind, text, written)
        elif kind == "string":
            yield _Token(kind, text, written_string(_value(text), any_case=text.endswith("i")))
        elif kind == "expression":
            inner, _, flags = text[1:].rpartition("/")
            yield _Token(kind, text, written_expression(inner, flags))
        elif not (text == ".." and begin):
            yield _Token(kind, text)


def _value(string: str) -> str:
    """Of a string as Lark writes it."""
    return str(json.loads(re.sub(r"(?<!\\)((?:\\\\)*)\\x", r"\1\\u00", string.removesuffix("i"))))


def _take_imports(text: str, into: _Lark) -> None:
    if "(" in text:
        names = [(name, name) for name in re.findall("[A-Z_]+", text.partition("(")[2])]
    else:
        names = [(name, alias or name) for name, alias in _IMPORTED.findall(text)]
    for name, alias in names:
        if name in _COMMON:
            written = written_expression(_COMMON[name])
            written.is_bounded = written.is_bounded or name == "ESCAPED_STRING"
            into.terminals[alias] = [_Token("expression", name, written)]
        else:
            into.library.append(f"%import common.{name} -> {alias}")


def _one_at_a_time(body: list[_Token], grammar: _Lark) -> list[_Token]:
    """What is ignored may come again and again: one unit is enough."""
    found = body
    if len(body) == 1 and body[0].kind == "name":
        found = grammar.terminals.get(body[0].text, body)
    written = found[0].written if len(found) == 1 else None
    if written is None or not written.one:
        return body
    return [_Token("expression", "", Written(written.one, written.units))]


def _is_ambiguous(grammar: _Lark) -> bool:
    """Whether a terminal may go on with an escape where another one may begin."""
    lexemes: dict[str, bool] = {}
    tokens = [token for rule in grammar.rules.values() for token in rule]
    bodies = [[token] for token in tokens if token.written]
    bodies += [grammar.terminals[one.text] for one in tokens if one.text in grammar.terminals]
    for body in (*bodies, *grammar.ignored):
        pieces = list(islice(_pieces(body, grammar), _MOST_PIECES + 1))
        if len(pieces) > _MOST_PIECES:
            raise FormError(f"has a terminal of more than {_MOST_PIECES} literals")
        units = [unit for piece in pieces for unit in piece.units]
        if any(units):
            name = " ".join(piece.literal for piece in pieces)
            lexemes[name] = _goes_on(body, pieces, units)
    return len(lexemes) > 1 and any(lexemes.values())


def _pieces(body: Sequence[_Token], grammar: _Lark, depth: int = 0) -> Iterator[Written]:
    """The literals of a terminal, and of those in it."""
    if depth > _DEEPEST:
        raise FormError(f"has terminals within others to more than {_DEEPEST} levels")
    for token in body:
        if token.written is not None:
            yield token.written
        elif token.kind == "name" and token.text in grammar.terminals:
            yield from _pieces(grammar.terminals[token.text], grammar, depth + 1)


def _goes_on(
    body: Sequence[_Token], pieces: Sequence[Written], units: Sequence[frozenset[str]]
) -> bool:
    """Whether a terminal may go on with an escape behind what it matches."""
    repeats = any(piece.repeats for piece in pieces)
    repeats = repeats or any(token.text in ("*", "+", "~", "{") for token in body)
    if not any(units[1:]) and not repeats:
        return False
    if any(token.kind == "expression" and token.text == "ESCAPED_STRING" for token in body):
        return False
    # One that ends with a character that it has nowhere else but at its begin.
    bounds = all(piece.is_bounded for piece in (pieces[0], pieces[-1]))
    is_sequence = body[0].written is not None and body[-1].written is not None
    has_choice = any(token.text == "|" for token in body)
    end = units[-1]
    within = any(end & unit for unit in units[1:-1])
    return not (
        bounds
        and is_sequence
        and not has_choice
        and len(end) == 1
        and units[0] <= end
        and not within
    )


def _is_recursive(grammar: _Lark) -> bool:
    uses: Mapping[str, set[str]] = {
        name: {token.text.lstrip("!?") for token in body if token.kind == "name"}
        for name, body in grammar.rules.items()
    }
    open_rules = dict(uses)
    while leaves := [name for name, used in open_rules.items() if not used & open_rules.keys()]:
        for name in leaves:
            del open_rules[name]
    return bool(open_rules)


def _text(grammar: _Lark) -> str:
    lines = [*grammar.library]
    for name, body in (*grammar.rules.items(), *grammar.terminals.items()):
        lines.append(f"{name}: {' '.join(map(_shown, body))}")
    lines += [f"%ignore {' '.join(map(_shown, body))}" for body in grammar.ignored]
    return "\n".join(lines)


def _shown(token: _Token) -> str:
    if token.kind == "alias":
        return ""
    return token.text if token.written is None else token.written.literal


def _as_one_terminal(grammar: _Lark) -> str:
    """Rules that are not recursive are terminals as well."""
    prefix = "RULE"
    while any(name.startswith(prefix) for name in (*grammar.terminals, *grammar.library)):
        prefix += "E"

    def named(rule: str) -> str:
        return f"{prefix}_{rule.upper()}"

    def shown(token: _Token) -> str:
        name = token.text.lstrip("!?")
        is_rule = token.kind == "name" and name in grammar.rules
        return named(name) if is_rule else _shown(token)

    lines = [*grammar.library, f"start: {named('start')}"]
    for name, body in grammar.rules.items():
        lines.append(f"{named(name)}: {' '.join(map(shown, body))}")
    for name, body in grammar.terminals.items():
        lines.append(f"{name}: {' '.join(map(_shown, body))}")
    return "\n".join(lines)
