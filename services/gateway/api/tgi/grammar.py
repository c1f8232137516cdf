"""TGI's `parameters.grammar`: the form that an answer is held to."""

import msgspec

from services.gateway.api.tgi.schema import Grammar, NamedSchema
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.typed import decoder_of
from services.gateway.reading.constraint import Constraint, Kind
from services.gateway.reading.structured.spellings import checked, of_value

_FIELD = "parameters.grammar"
_VALUE = f"{_FIELD}.value"
_ABSENT = (b"", b"null")


def read_grammar(grammar: Grammar | None) -> Constraint | None:
    """The form, or None for none. A schema is an object, or the text of one. Raises InvalidRequest naming the field."""
    if grammar is None:
        return None
    if grammar.type not in ("json", "json_schema", "regex"):
        raise wrong(f"{_FIELD}.type", 'must be one of "json", "json_schema", "regex"')
    if grammar.type != "json_schema":
        kind: Kind = "regex" if grammar.type == "regex" else "json"
        return checked(of_value(kind, grammar.value, _VALUE))
    value = bytes(grammar.value)
    if value in _ABSENT:
        raise wrong(_VALUE, "is missing")
    return checked(Constraint(f"{_VALUE}.schema", "json", _schema(value)))


def _schema(value: bytes) -> bytes:
    try:
        schema = bytes(decoder_of(NamedSchema).decode(value).schema)
    except msgspec.DecodeError as error:
        raise wrong(_VALUE, f'must be an object with the schema as "schema": {error}') from None
    if schema in _ABSENT:
        raise wrong(f"{_VALUE}.schema", "is missing")
    return schema
