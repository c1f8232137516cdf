"""Grammars within a string of JSON: what is accepted there is what is accepted outside, written in JSON."""

import json
import random
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.gateway.reading.structured.errors import FormError
from services.gateway.reading.structured.json_strings import _COMMON, in_json_string

BYTES = LLTokenizer("byte")
ALPHABET = list('ab"\\\n\t\r\x01nN/ .]x1,d\f*#-{}+é')


def accepts(lark: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def as_written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


PATCH = """start: begin hunk+ end
begin: "*** Begin" NL
end: "*** End" NL?
hunk: name NL line+ -> hunk
?name: "@ " /(.+)/
!line: ("+" | "-" | " ") /(.*)/ NL
%import common.LF -> NL
"""
# A text of each, from which others are made.
GRAMMARS = [
    ('start: "a\\n" | "b\\"c"i | /x./', ["a\n", 'B"C', "x\\"]),
    (r'start: /(?i:a[b-d]\n)\s*"\\/ X?' + "\nX: /[^a]/", ['Ac\n "\\n', 'ab\n\t"\\\t']),
    ('start: A+\nA: "\\x09".."d"\n', ["\t\n ab", '"\\']),
    ('%import common (INT, NEWLINE)\nstart: INT (NEWLINE INT)* // "\n', ["1\n2\r\n\n3"]),
    ('start: /(?s:.)/ /.+/s', ['\n"\\.']),
    ('start: /.*/ "\\n" /.*/s\n', ['a"\\b\n\n"']),
    (r'start: /[]a"]{1,3}/ /[^\]\n]?/ /\d|\W/', ['a]"n\n', "a\f1"]),
    (r"start: /[\x00-\x{10ffff}&&[^\n]]\x22\u005c\u{a}?/", ['\t"\\\n', 'é"\\']),
    ("start: /[[:punct:]]{2}/", ['\\"', "/."]),
    ('start: /((?i)a|\\n)b/ "n\\n"i', ["AbN\n", "\nbn\n"]),
    ('start: ("\\t"|"\\\\")~1..3\n', ["\t\\\t"]),
    ('start: "/"i "\\\\n#"i', ["/\\N#"]),
    ('%import common.WS\n%import common.ESCAPED_STRING -> S\n%ignore WS\nstart: S ("," S)*\n',
     ['"a\\"" ,\n\t"\\\\"']),
    ('?start: value\nvalue: obj | S | N\nobj: "{" [S ":" value ("," S ":" value)*] "}"\n'
     'S: "\\"" /[^"]/* "\\""\n%import common.INT -> N\n%ignore /[ \\t\\n]+/', ['{"a" :\n{"": 1}, "b":"x\\"}']),
    (PATCH, ['*** Begin\n@ a "b".py\n+x\\y\n-\t\n@ q\n \n*** End']),
]  # fmt: skip


def changed(draw: random.Random, text: str) -> str:
    """Nearly the same text."""
    chars = list(text)
    for _ in range(draw.randint(0, 2)):
        place = draw.randrange(len(chars) + 1)
        chars[place : place + draw.randint(0, 1)] = draw.choices(ALPHABET, k=draw.randint(0, 1))
    return "".join(chars)


@pytest.mark.parametrize(("lark", "texts"), GRAMMARS, ids=lambda value: str(value)[:40])
def test_what_is_written_is_accepted_where_the_text_is(lark: str, texts: Sequence[str]) -> None:
    within = in_json_string(lark)
    draw = random.Random(1)
    for text in texts:
        assert accepts(lark, text) and accepts(within, as_written(text)), text
        for _ in range(60):
            other = changed(draw, text)
            assert accepts(within, as_written(other)) == accepts(lark, other), other
        if "\n" in text:
            assert not accepts(within, text), "a line end is no part of a string of JSON"


@pytest.mark.parametrize("name", _COMMON)
def test_terminals_of_larks_library_are_the_same(name: str) -> None:
    lark, ours = f"%import common.{name}\nstart: {name}", f"start: /{_COMMON[name]}/"
    draw, found = random.Random(2), 0
    begins = {"C_COMMENT": "/*", "CPP_COMMENT": "//", "SQL_COMMENT": "--", "SH_COMMENT": "#"}
    ends = {"C_COMMENT": "*/", "ESCAPED_STRING": '"'}
    inner = "/*a\n-" if "COMMENT" in name else '"\\a\n' if name in ends else " \t\r\n\f\v"
    for _ in range(300):
        text = "".join(draw.choices(inner, k=draw.randint(0, 4)))
        if name in begins or name in ends:
            text = begins.get(name, '"') + text + ends.get(name, "")
        is_one = accepts(lark, text)
        assert accepts(ours, text) == is_one, text
        found += is_one
    assert found > 3


@pytest.mark.parametrize(
    "lark",
    [
        'start: %json {"type": "object"}',
        'start: %regex {"substring_chars": "ab"}',
        "%llguidance {}\nstart: /a/",
        "start: <[5]>",
        "start: @other",
        'start[max_tokens=5]: "a"',
        'start[capture]: "a"',
        "start: A\nA: /a/ & /b/",
        "start: /a b/x",
        "start: /(?x)a b/",
        'start: "a"\nrest: A\nA: A "b"',
        'start: "a"\nrest: A\nA: B B\nB: C C\nC: D D\nD: "x"' + ' "x"' * 600,
        'start: "(" start* ")" | /"[^"]*/ | "\\n\\n"\n',
    ],
)
def test_what_would_mean_something_else_is_refused(lark: str) -> None:
    with pytest.raises(FormError):
        in_json_string(lark)
