"""The form of answers that call tools, as a tree of structural tags: what is allowed is what the fold of the same row
reads as whole calls.
"""

from collections.abc import Mapping
from typing import Any

from shared.output_format.table import Body, OutputFormat, ReasoningFormat, Xml
from shared.output_format.xml_reader import schema_types

Form = dict[str, Any]

_TEXT: Form = {"type": "any_text"}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def has_grammar(row: OutputFormat) -> bool:
    """Whether calls of this row can be demanded."""
    return row.body is not Body.PYTHONIC


def calls_form(row: OutputFormat, schemas: Mapping[str, Any], *, single: bool) -> Form:
    """At least one call of the tools, and nothing else; `single`: one. `schemas`: of their parameters by name."""
    tags = [_call(row, name, schema or _NO_PARAMETERS) for name, schema in schemas.items()]
    several: Form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": row.join,
        "at_least_one": True,
        "stop_after_first": single,
    }
    if row.body is Body.JSON_ARRAY:
        return _sequence(_const(row.open + "["), several, _const("]" + row.close))
    if row.around is not None:
        first, last = row.around
        space = row.around_space
        return _sequence(_const(first + space), several, _const(space + last))
    return several


def behind_reasoning(
    form: Form, reasoning: ReasoningFormat, *, in_reasoning: bool, most: int | None = None
) -> Form:
    """The same behind what the model thinks, of at most so many tokens: it must come to its end where the prompt has
    opened it, else it may be left out. A bound needs markers that are tokens.
    """
    thought = {
        "type": "tag",
        "begin": "" if in_reasoning else reasoning.open,
        "content": _TEXT if most is None else _tokens_but(reasoning.close, most),
        "end": reasoning.close,
    }
    behind = _sequence(thought, _const("\n\n"))
    return _sequence(behind if in_reasoning else _maybe(behind), form)


def bounded_reasoning(reasoning: ReasoningFormat, most: int, *, in_reasoning: bool) -> Form:
    """Any answer in which the model thinks at most so many tokens, once, and at its beginning. Its markers are
    tokens.
    """
    thought = {
        "type": "tag",
        "begin": "" if in_reasoning else reasoning.open,
        "content": _tokens_but(reasoning.close, most),
        "end": reasoning.close,
    }
    return _sequence(thought if in_reasoning else _maybe(thought), _tokens_but(reasoning.open))


def _tokens_but(marker: str, most: int | None = None) -> Form:
    return {"type": "any_tokens", "excludes": [marker], "max_tokens": most}


def _call(row: OutputFormat, name: str, schema: Any) -> Form:
    arguments: Form = {"type": "json_schema", "json_schema": schema}
    bare = row.at_start or row.body is Body.JSON_ARRAY
    opened, closed = ("", "") if bare else (row.open, row.close)
    match row.body:
        case Body.NAME_JSON if row.numbered:
            number = {"type": "regex", "pattern": "[0-9]{1,3}"}
            content = _sequence(number, _const(row.name_end), arguments)
            return _tag(f"{row.open}{row.name_prefix}{name}:", content, row.tail + row.close)
        case Body.NAME_JSON:
            begin = f"{row.open}{row.name_prefix}{name}{row.name_end}"
            return _tag(begin, arguments, row.tail + row.close)
        case Body.XML:
            assert row.xml is not None
            return _xml_call(row, row.xml, name, schema)
        case _:
            key = row.args_keys[0]
            begin = f'{opened}{row.space[0]}{{"name": {_quoted(name)}, "{key}": '
            return _tag(begin, arguments, f"}}{row.space[1]}{closed}")


def _xml_call(row: OutputFormat, xml: Xml, name: str, schema: Any) -> Form:
    """Each argument in the order of the schema; those that are not required may be left out."""
    behind_open = "\n" if xml.name_open.startswith("<") else ""
    line = "\n" if xml.breaks else ""
    parts: list[Form] = []
    schema = schema if isinstance(schema, Mapping) else _NO_PARAMETERS
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties")
    for key, given in (properties if isinstance(properties, Mapping) else {}).items():
        begin = f"{xml.key_open}{key}{xml.key_close}"
        begin += f"\n{xml.value_open}" if xml.value_open else line
        one = _sequence(_value(begin, xml, given, definitions), _const("\n"))
        required = schema.get("required")
        parts.append(one if isinstance(required, list) and key in required else _maybe(one))
    ending = f"{xml.end}\n" if xml.end else ""
    head = f"{row.open}{behind_open}{xml.name_open}{name}{xml.name_close}\n"
    return _tag(head, _sequence(*parts, _const("")), ending + row.close)


def _value(begin: str, xml: Xml, schema: Any, definitions: Mapping[str, Any]) -> Form:
    line = "\n" if xml.breaks else ""
    if "string" not in schema_types(schema):
        within = {**schema, **definitions} if isinstance(schema, Mapping) else schema
        content: Form = {"type": "json_schema", "json_schema": within}
        return _tag(begin, content, line + xml.value_close)
    listed = schema.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed):
        texts: Form = {"type": "or", "elements": [_const(one) for one in listed]}
        return _tag(begin, texts, line + xml.value_close)
    return _tag(begin, _TEXT, xml.value_close)


def _tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _maybe(form: Form) -> Form:
    return {"type": "or", "elements": [form, _const("")]}


def _quoted(name: str) -> str:
    """As JSON, which is how models write names."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
