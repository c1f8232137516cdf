"""The form of answers that call tools, as a tree of structural tags: what is allowed is what the fold of the same row
reads as whole calls.
"""

import re
from collections.abc import Mapping
from typing import Any

from shared.output_format.custom_input import INPUT
from shared.output_format.table import Body, OutputFormat, ReasoningFormat, Xml
from shared.output_format.xml_reader import schema_types

Form = dict[str, Any]

_TEXT: Form = {"type": "any_text"}
# Of functions whose arguments are not held to anything: with it, those that a model writes one by one are any text.
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def has_grammar(row: OutputFormat) -> bool:
    """Whether calls of this row can be demanded."""
    return row.body is not Body.PYTHONIC


def calls_form(
    row: OutputFormat,
    schemas: Mapping[str, Any],
    *,
    single: bool,
    inputs: Mapping[str, Form] | None = None,
) -> Form:
    """At least one call of the tools, and nothing else; `single`: one. `schemas`: of their parameters by name;
    `inputs`: the grammars of custom tools (`services/gateway/reading/structured/tool_inputs.py`).
    """
    tags = _calls(row, schemas, inputs or {})
    several: Form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": row.join,
        "at_least_one": True,
        "stop_after_first": single,
    }
    begin, end = _around(row)
    return _sequence(_const(begin), several, _const(end)) if begin else several


def text_or_calls_form(
    row: OutputFormat, schemas: Mapping[str, Any], *, inputs: Mapping[str, Form]
) -> Form:
    """Text in which what begins as a call is a whole one."""
    if row.at_start:
        calls = calls_form(row, schemas, single=False, inputs=inputs)
        marker = re.sub(r"([^\w<>_])", r"\\\1", row.open)
        text = rf"start: TEXT{chr(10)}TEXT: /\s*([^\s{{](.|\n)*)?/ & ~/(.|\n)*{marker}(.|\n)*/"
        space = {"type": "regex", "pattern": r"\s*"}
        return _either(_sequence(space, calls), {"type": "grammar", "grammar": text})
    begin, end = _around(row)
    tags = _calls(row, schemas, inputs)
    if begin:
        several = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": row.join,
            "at_least_one": True,
        }
        tags = [_tag(begin, several, end)]
    trigger = row.around[0] if row.around is not None else row.open
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def _around(row: OutputFormat) -> tuple[str, str]:
    """What stands before and behind all calls."""
    if row.body is Body.JSON_ARRAY:
        return row.open + "[", "]" + row.close
    first, last = row.around or ("", "")
    return first + row.around_space, row.around_space + last


def _calls(row: OutputFormat, schemas: Mapping[str, Any], inputs: Mapping[str, Form]) -> list[Form]:
    return [
        _call(row, name, schema or _NO_PARAMETERS, inputs.get(name))
        for name, schema in schemas.items()
    ]


def behind_reasoning(
    form: Form,
    reasoning: ReasoningFormat,
    *,
    in_reasoning: bool,
    most: int | None = None,
    gap: str = "\n\n",
) -> Form:
    """The same behind what the model thinks, of at most so many tokens: it must come to its end where the prompt has
    opened it, else it may be left out. A bound needs markers that are tokens. `gap`: what stands between the two.
    """
    thought = {
        "type": "tag",
        "begin": "" if in_reasoning else reasoning.open,
        "content": _TEXT if most is None else _tokens_but(reasoning.close, most),
        "end": reasoning.close,
    }
    behind = _sequence(thought, _const(gap))
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


def _call(row: OutputFormat, name: str, schema: Any, given: Form | None) -> Form:
    arguments: Form = {"type": "json_schema", "json_schema": schema}
    if given is not None:
        arguments = _sequence(_const(f'{{"{INPUT}": "'), given, _const('"}'))
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
            return _xml_call(row, row.xml, name, schema, given)
        case _:
            key = row.args_keys[0]
            begin = f'{opened}{row.space[0]}{{"name": {_quoted(name)}, "{key}": '
            return _tag(begin, arguments, f"}}{row.space[1]}{closed}")


def _xml_call(row: OutputFormat, xml: Xml, name: str, schema: Any, given: Form | None) -> Form:
    """Each argument in the order of the schema; those that are not required may be left out."""
    behind_open = "\n" if xml.name_open.startswith("<") else ""
    head = f"{row.open}{behind_open}{xml.name_open}{name}{xml.name_close}\n"
    ending = f"{xml.end}\n" if xml.end else ""
    if given is not None:
        one = _input(_key(xml, INPUT), xml, given)
        return _tag(head, _sequence(one, _const("\n")), ending + row.close)
    if schema is ANY_ARGUMENTS:
        return _tag(head, _any_arguments(xml), ending + row.close)
    parts: list[Form] = []
    schema = schema if isinstance(schema, Mapping) else _NO_PARAMETERS
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties")
    for key, value in (properties if isinstance(properties, Mapping) else {}).items():
        one = _sequence(_value(_key(xml, key), xml, value, definitions), _const("\n"))
        required = schema.get("required")
        parts.append(one if isinstance(required, list) and key in required else _maybe(one))
    return _tag(head, _sequence(*parts, _const("")), ending + row.close)


def _any_arguments(xml: Xml) -> Form:
    """Arguments of any names and values."""
    opened, closed = xml.key_open, _key(xml, "").removeprefix(xml.key_open)
    pair = _sequence(_tag("", _TEXT, closed), _tag("", _TEXT, xml.value_close))
    return {"type": "tags_with_separator", "tags": [_tag(opened, pair, "\n")], "separator": ""}


def _key(xml: Xml, key: str) -> str:
    """What stands before a value."""
    line = "\n" if xml.breaks else ""
    return f"{xml.key_open}{key}{xml.key_close}" + (
        f"\n{xml.value_open}" if xml.value_open else line
    )


def _input(begin: str, xml: Xml, given: Form) -> Form:
    """What a custom tool is given, as it is or as a string of JSON."""
    end = ("\n" if xml.breaks else "") + xml.value_close
    if given["syntax"] == "lark":
        return _tag(begin + '"', given, f'"{end}')
    return _sequence(_const(begin), {**given, "end": end})


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
    return _either(form, _const(""))


def _either(*forms: Form) -> Form:
    return {"type": "or", "elements": list(forms)}


def _quoted(name: str) -> str:
    """As JSON, which is how models write names."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
