"""Reads one call, or a list of them, behind its opening marker."""

import ast
import json
import re
from collections.abc import Collection, Generator, Mapping
from typing import Any

from shared.output_format.json_reader import (
    MARKS,
    Malformed,
    behind_space,
    copy_nested,
    copy_value,
    read_string,
)
from shared.output_format.table import Body, OutputFormat
from shared.output_format.xml_reader import copy_arguments, read_name

_LONGEST_HEAD = 1024
_NUMBERED = re.compile(r":\d+$")


class CallReader:
    """Reads one call. `name` is the tool's once it is known; of a list of PYTHONIC calls all are in `listed`."""

    def __init__(
        self,
        row: OutputFormat,
        tools: Mapping[str, Any],
        *,
        needs_known: bool = False,
        quoted: Collection[str] = (),
    ) -> None:
        """`tools`: the schemas of their parameters by name. `needs_known`: a call of another tool is none. `quoted`:
        tools whose arguments are JSON values where the row has them as they are.
        """
        self.name = ""
        self.listed: list[tuple[str, str]] = []
        # Whether the marker that closes the call was read with it.
        self.closed = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self._row = row
        self._tools = tools
        self._quoted = quoted
        self._work = self._reading()
        next(self._work)
        self._needs_known = needs_known

    def push(self, text: str) -> str | None:
        """Takes more; returns what is behind the call once it is whole, None before. Raises Malformed."""
        for index, char in enumerate(text):
            try:
                self._work.send(char)
            except StopIteration:
                return text[index + 1 :]
            except Malformed as error:
                error.rest = text[index:]
                raise
        return None

    def take(self) -> str:
        """The text of the arguments since the last time; nothing before the name is known."""
        if not self.name:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _reading(self) -> Generator[None, str, None]:
        match self._row.body:
            case Body.JSON | Body.JSON_ARRAY:
                yield from self._json()
            case Body.NAME_JSON:
                yield from self._named()
            case Body.XML:
                yield from self._xml()
            case Body.PYTHONIC:
                yield from self._pythonic()

    def _json(self) -> Generator[None, str, None]:
        if (yield from behind_space()) != "{":
            raise Malformed
        char = yield from behind_space()
        while char != "}":
            if char != '"':
                raise Malformed
            key = yield from read_string()
            if (yield from behind_space()) != ":":
                raise Malformed
            char = yield from self._member(key, (yield from behind_space()))
            if char == ",":
                char = yield from behind_space()
            elif char != "}":
                raise Malformed
        if not self.name:
            raise Malformed
        if not self._has_arguments:
            self._arguments.append("{}")

    def _member(self, key: str, first: str) -> Generator[None, str, str]:
        """A member whose value begins with `first`; returns the first character behind it."""
        if key == "name":
            if self.name or first != '"':
                raise Malformed
            self.name = self._checked((yield from read_string()))
            return (yield from behind_space())
        if key in self._row.args_keys and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._value(first))
        return (yield from copy_value([], first))

    def _value(self, first: str) -> Generator[None, str, str]:
        """The arguments; they may be an object, or a string that holds one."""
        if first == "{":
            return (yield from copy_value(self._arguments, first))
        if first == '"':
            text = yield from read_string()
            self._arguments.append(
                text if _is_object(text) else json.dumps(text, ensure_ascii=False)
            )
            return (yield from behind_space())
        other: list[str] = []
        char = yield from copy_value(other, first)
        self._arguments.append("{}" if other == list("null") else "".join(other))
        return char

    def _named(self) -> Generator[None, str, None]:
        head, end = "", self._row.name_end
        while not head.endswith(end):
            char = yield
            if char == "{":
                break
            head += char
            if len(head) > _LONGEST_HEAD:
                raise Malformed
        else:
            head, char = head[: -len(end)], ""
        head = head.strip()
        if self._row.name_prefix:
            head = head.removeprefix(self._row.name_prefix)
        name = MARKS.split(head, maxsplit=1)[0]
        self.name = _NUMBERED.sub("", name.partition("[CALL_ID]")[0].strip())
        if not self.name or (char or (yield from behind_space())) != "{":
            raise Malformed
        yield from copy_nested(self._arguments, "{")

    def _xml(self) -> Generator[None, str, None]:
        xml, close = self._row.xml, self._row.close
        assert xml is not None
        self.name, mark = yield from read_name(xml, close)
        if not self.name:
            raise Malformed
        schema = self._tools.get(self.name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        properties = properties if isinstance(properties, Mapping) else {}
        is_quoted = self.name in self._quoted
        yield from copy_arguments(self._arguments, xml, close, mark, properties, is_quoted)
        self.closed = not xml.end

    def _pythonic(self) -> Generator[None, str, None]:
        if (yield from behind_space()) != "[":
            raise Malformed
        text, depth = "[", 1
        while depth:
            char = yield
            text += char
            if char in "\"'":
                text += yield from _python_string(char)
            else:
                depth += (char in "[({") - (char in "])}")
        self.listed = [(self._checked(name), args) for name, args in _python_calls(text)]

    def _checked(self, name: str) -> str:
        if self._needs_known and name not in self._tools:
            raise Malformed
        return name


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _python_string(quote: str) -> Generator[None, str, str]:
    text, escaped = "", False
    while True:
        char = yield
        text += char
        if char == quote and not escaped:
            return text
        escaped = char == "\\" and not escaped


def _python_calls(text: str) -> list[tuple[str, str]]:
    """The calls of a list, their arguments as JSON. Raises Malformed."""
    try:
        listed = ast.parse(text, mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            raise Malformed
        return [_python_call(call) for call in listed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or None in [k.arg for k in call.keywords]:
        raise Malformed
    values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False)


def _literal(node: ast.expr) -> Any:
    """As Python writes it; JSON's own names are taken too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(map(str, keys), map(_literal, node.values), strict=True))
    return ast.literal_eval(node)
