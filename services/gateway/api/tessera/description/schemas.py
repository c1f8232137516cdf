"""JSON schemas of the Structs of bodies and replies, as the API's description shows them.

They are not msgspec's own, which fail at fields that are JSON left unread.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect as types

from services.gateway.decoding.about import DEFAULT_KEY, REFUSED_KEY
from services.gateway.reading.options import GenerationOptions

Schema = dict[str, Any]
Kind = type[msgspec.Struct]

_REF = "#/components/schemas/"
_PLAIN: Mapping[type[types.Type], str] = {
    types.NoneType: "null",
    types.BoolType: "boolean",
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "string",
}
# What a field of another Struct takes over from the field of this name of `GenerationOptions`, whose meaning it has.
_TAKEN_OVER = ("description", DEFAULT_KEY)


class Schemas:
    """Of several Structs. `components` has all of them, and those that they are made of, by name."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        found: dict[Kind, types.StructType] = {}
        for kind in kinds:
            _collect(types.type_info(kind), found)
        counts = Counter(kind.__name__ for kind in found)
        # Of several with one name each has that of its API before it.
        self._names = {
            kind: kind.__name__ if counts[kind.__name__] == 1 else _qualified(kind)
            for kind in found
        }
        self.components = {self._names[kind]: self._struct(info) for kind, info in found.items()}

    def ref(self, kind: Kind) -> Schema:
        """The reference to its schema."""
        return {"$ref": _REF + self._names[kind]}

    def fields(self, kind: Kind) -> Mapping[str, Schema]:
        """The schemas of its fields by name."""
        fields: Mapping[str, Schema] = self.components[self._names[kind]]["properties"]
        return fields

    def example(self, kind: Kind) -> Schema:
        """A body of the examples that its fields have."""
        fields = self.fields(kind)
        return {name: field["examples"][0] for name, field in fields.items() if "examples" in field}

    def _struct(self, info: types.StructType) -> Schema:
        """Without the fields that are refused; its own come before those that it has from others."""
        order = [name for kind in info.cls.__mro__ for name in inspect.get_annotations(kind)]
        listed = sorted(info.fields, key=lambda field: order.index(field.name))
        fields = {field.encode_name: self._field(field) for field in listed}
        schema: Schema = {
            "title": info.cls.__name__,
            "type": "object",
            "description": inspect.getdoc(info.cls) or "",
            "properties": {k: field for k, field in fields.items() if REFUSED_KEY not in field},
            "required": [field.encode_name for field in info.fields if field.required],
        }
        return {**schema, "additionalProperties": False} if info.forbid_unknown_fields else schema

    def _field(self, field: types.Field) -> Schema:
        schema = self._schema(field.type)
        told = _told().get(field.name, {})
        if "description" not in schema and "$ref" not in schema:
            schema |= {key: told[key] for key in _TAKEN_OVER if key in told}
        # Null only says that it may be left out.
        if isinstance(field.default, str | int | float):
            schema["default"] = field.default
        return schema

    def _schema(self, info: types.Type) -> Schema:
        if isinstance(info, types.Metadata):
            return self._schema(info.type) | (info.extra_json_schema or {})
        if isinstance(info, types.StructType):
            return self.ref(info.cls)
        if isinstance(info, types.UnionType):
            return self._union(info)
        if isinstance(info, types.ListType):
            return {"type": "array", "items": self._schema(info.item_type)}
        if isinstance(info, types.BytesType):  # of a form, where it stands as it is
            return {"type": "string", "contentMediaType": "application/octet-stream"}
        if isinstance(info, types.DictType):
            return {"type": "object", "additionalProperties": self._schema(info.value_type)}
        plain = _PLAIN.get(type(info))
        return {"type": plain} if plain else {}  # any JSON

    def _union(self, info: types.UnionType) -> Schema:
        options = [self._schema(option) for option in info.types]
        if {"type": "integer"} in options:  # whole numbers are declared as `Whole`
            options = [option for option in options if option != {"type": "number"}]
        if not all(option.keys() == {"type"} for option in options):
            return {"anyOf": options}
        names = [option["type"] for option in options]
        return {"type": names if len(names) > 1 else names[0]}


def _collect(info: types.Type, found: dict[Kind, types.StructType]) -> None:
    if isinstance(info, types.StructType):
        if info.cls in found:
            return
        found[info.cls] = info
    for inner in _inner(info):
        _collect(inner, found)


def _inner(info: types.Type) -> Iterator[types.Type]:
    if isinstance(info, types.StructType):
        yield from (field.type for field in info.fields)
    elif isinstance(info, types.Metadata):
        yield info.type
    elif isinstance(info, types.UnionType):
        yield from info.types
    elif isinstance(info, types.ListType):
        yield info.item_type
    elif isinstance(info, types.DictType):
        yield info.value_type


@functools.cache
def _told() -> Mapping[str, Schema]:
    """What is said of the fields of `GenerationOptions`."""
    info = types.type_info(GenerationOptions)
    assert isinstance(info, types.StructType)
    found = {field.name: field.type for field in info.fields}
    return {
        name: kind.extra_json_schema or {}
        for name, kind in found.items()
        if isinstance(kind, types.Metadata)
    }


def _qualified(kind: Kind) -> str:
    return f"{kind.__module__.split('.')[-2]}.{kind.__name__}"
