"""From the fields of a body to the one form that its answer is held to."""

from collections.abc import Iterator

import msgspec

from services.gateway.decoding.bounds import wrong
from services.gateway.reading.constraint import LONGEST, Constraint, Kind
from services.gateway.reading.structured.fields import (
    ResponseFormat,
    StructuredFields,
    StructuredOutputs,
)
from shared.errors import InvalidRequest

_OBJECT = b'{"type":"object"}'
_FORMATS = ("text", "json_object", "json_schema", "structural_tag", "json", "regex")


def read_constraint(fields: StructuredFields) -> Constraint | None:
    """The form, or None for none. Raises InvalidRequest naming the field: for two, one that is too long, one that is
    not there, and settings of another form.
    """
    found = [*_of_response_format(fields), *_of_structured_outputs(fields), *_of_older(fields)]
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise InvalidRequest(
            "CONFLICTING_CONSTRAINTS",
            f"{first} and {second} both constrain the answer: give one",
            field=first,
        )
    if not found:
        _refuse_settings_alone(fields)
        return None
    [constraint] = found
    if constraint.whitespace is None:
        _refuse_whitespace(fields)
    return checked(constraint)


def any_object(field: str) -> Constraint:
    """Any JSON object, which `field` asks for."""
    return Constraint(field, "json", _OBJECT, closed=False)


def of_value(kind: Kind, value: msgspec.Raw, field: str) -> Constraint:
    """A schema (`kind` json) or an expression (regex) as TGI has it. Raises InvalidRequest naming the field."""
    given = _given(value)
    if given is None:
        raise wrong(field, "is missing")
    if kind == "regex" and (not given.startswith(b'"') or given == b'""'):
        raise wrong(field, "must be a string of at least one character")
    return Constraint(field, kind, given)


def checked(constraint: Constraint) -> Constraint:
    """The same. Raises InvalidRequest for one that is too long."""
    if len(constraint.json) > LONGEST:
        raise wrong(
            constraint.field,
            f"must not be longer than {LONGEST >> 10} KiB as JSON, and has {len(constraint.json) >> 10}",
        )
    return constraint


def _of_response_format(fields: StructuredFields) -> Iterator[Constraint]:
    form = fields.response_format
    if form is None:
        return
    name = "response_format"
    if form.type not in _FORMATS:
        names = ", ".join(f'"{one}"' for one in _FORMATS)
        what = "is missing: it" if form.type is None else ""
        raise wrong(f"{name}.type", f"{what} must be one of {names}".strip())
    if form.type == "json_object":
        found = [
            Constraint(f"{name}.{field}", "json", schema)
            for field, raw in (("schema", form.schema), ("value", form.value))
            if (schema := _given(raw)) is not None
        ]
        yield from found or [any_object(name)]
    elif form.type == "json_schema":
        yield _of_json_schema(form, f"{name}.json_schema")
    elif form.type in ("json", "regex"):
        yield of_value("regex" if form.type == "regex" else "json", form.value, f"{name}.value")
    elif form.type == "structural_tag":
        parts = {"format": form.format, "structures": form.structures, "triggers": form.triggers}
        given = {part: raw for part, raw in parts.items() if _given(raw) is not None}
        yield Constraint(name, "structural_tag", msgspec.json.encode(given))


def _of_json_schema(form: ResponseFormat, name: str) -> Constraint:
    named = form.json_schema
    if named is None:
        raise wrong(name, 'is missing: it must be an object with the schema as "schema"')
    schema = _given(named.schema)
    if schema is None:
        raise wrong(
            f"{name}.schema", 'is missing; for any JSON object send {"type": "json_object"}'
        )
    loose = named.strict is False
    return Constraint(f"{name}.schema", "json", schema, closed=not loose, lenient=loose)


def _of_structured_outputs(fields: StructuredFields) -> Iterator[Constraint]:
    outputs = fields.structured_outputs
    if outputs is None:
        return
    name = "structured_outputs"
    whitespace = _whitespace(outputs, name)
    closed = outputs.disable_additional_properties is not False
    if (schema := _given(outputs.json)) is not None:
        yield Constraint(f"{name}.json", "json", schema, closed, whitespace=whitespace)
    if outputs.json_object:
        yield Constraint(f"{name}.json_object", "json", _OBJECT, False, whitespace=whitespace)
    if (tag := _given(outputs.structural_tag)) is not None:
        tag_name = f"{name}.structural_tag"
        yield Constraint(tag_name, "structural_tag", tag, closed, whitespace=whitespace)
    yield from _texts(name + ".", outputs.regex, outputs.choice, outputs.grammar)


def _of_older(fields: StructuredFields) -> Iterator[Constraint]:
    whitespace = fields.guided_whitespace_pattern
    if (schema := _given(fields.guided_json)) is not None:
        yield Constraint("guided_json", "json", schema, whitespace=whitespace)
    if fields.guided_json_object:
        yield Constraint("guided_json_object", "json", _OBJECT, False, whitespace=whitespace)
    yield from _texts("guided_", fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    if (tag := _given(fields.structural_tag)) is not None:
        yield Constraint("structural_tag", "structural_tag", tag)


def _texts(
    prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Constraint]:
    values: tuple[tuple[Kind, str | list[str] | None], ...] = (
        ("regex", regex),
        ("choice", choice),
        ("grammar", grammar),
    )
    for kind, value in values:
        if value is None:
            continue
        if not value:
            what = "one choice" if kind == "choice" else "one character"
            raise wrong(f"{prefix}{kind}", f"must hold at least {what}: leave it out for none")
        yield Constraint(f"{prefix}{kind}", kind, msgspec.json.encode(value))


def _whitespace(outputs: StructuredOutputs, name: str) -> str | None:
    if not outputs.disable_any_whitespace:
        return outputs.whitespace_pattern
    if outputs.whitespace_pattern is not None:
        raise InvalidRequest(
            "CONFLICTING_CONSTRAINTS",
            f"{name}.whitespace_pattern and {name}.disable_any_whitespace exclude each other: give one",
            field=f"{name}.whitespace_pattern",
        )
    return ""


def _refuse_whitespace(fields: StructuredFields) -> None:
    """Beside a form that is no JSON it would be ignored."""
    outputs = fields.structured_outputs or StructuredOutputs()
    for name, given in (
        ("guided_whitespace_pattern", fields.guided_whitespace_pattern),
        ("structured_outputs.whitespace_pattern", outputs.whitespace_pattern),
        ("structured_outputs.disable_any_whitespace", outputs.disable_any_whitespace or None),
    ):
        if given is not None:
            raise wrong(name, "is for a form of JSON beside it: leave it out")


def _refuse_settings_alone(fields: StructuredFields) -> None:
    """Without a form they would be ignored."""
    _refuse_whitespace(fields)
    outputs = fields.structured_outputs
    if outputs is not None and outputs != StructuredOutputs():
        raise wrong(
            "structured_outputs",
            "has no form: it must hold json, json_object, regex, choice, grammar or structural_tag",
        )


def _given(raw: msgspec.Raw) -> bytes | None:
    """The JSON of a field; None where it is absent or null."""
    given = bytes(raw)
    return given if given not in (b"", b"null") else None
