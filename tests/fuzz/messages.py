"""Protobuf messages by their descriptors, filled with values of the right type and the wrong size; or no messages."""

import random
import struct
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz import forms, values
from tests.fuzz.right.pictures import picture_file

_INTEGERS = [0, 1, -1, 2, 7, 100, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**32 - 1, 2**64 - 1]
_FLOATS = [0.0, -1.0, 0.5, 1.0, 2.0, float("nan"), float("inf"), -float("inf"), 1e308, 1e-320]
_OF_JSON = ("json", "structural_tag", "arguments", "tool_choice")
_FORMS = {"regex": forms.expression, "grammar": forms.grammar}
_KEPT = 0.35  # of a message's fields are set
_DEEPEST = 5


def random_message(draw: random.Random, descriptor: Descriptor) -> bytes:
    """A serialized message of this type, sometimes with bytes that are none."""
    if draw.random() < 0.15:
        return draw.randbytes(draw.choice([0, 1, 7, 64, 5000]))
    message = GetMessageClass(descriptor)()
    _fill(draw, message, _DEEPEST)
    written = bytearray(message.SerializeToString())
    if written and draw.random() < 0.15:
        written[draw.randrange(len(written))] = draw.randrange(256)
    return bytes(written)


def _fill(draw: random.Random, message: Message, deepest: int) -> None:
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in fields:
        if draw.random() > _KEPT:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if deepest:
                _fill_inner(draw, message, field, deepest)
        elif field.is_repeated:
            count = draw.choice([0, 1, 2, 5, 5000])
            getattr(message, field.name).extend([_scalar(draw, field)] * count)
        else:
            setattr(message, field.name, _scalar(draw, field))


def _fill_inner(
    draw: random.Random, message: Message, field: FieldDescriptor, deepest: int
) -> None:
    inner = getattr(message, field.name)
    assert field.message_type is not None
    if field.message_type.GetOptions().map_entry:
        key, value = (
            field.message_type.fields_by_name["key"],
            field.message_type.fields_by_name["value"],
        )
        if value.type != FieldDescriptor.TYPE_MESSAGE:
            for _ in range(draw.choice([1, 3, 300])):
                inner[_scalar(draw, key)] = _scalar(draw, value)
    elif field.is_repeated:
        for _ in range(draw.choice([1, 1, 2, 3])):
            _fill(draw, inner.add(), deepest - 1)
    else:
        inner.SetInParent()
        _fill(draw, inner, deepest - 1)


def _scalar(draw: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return _string(draw, field)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return draw.choice([0, 1, 2, 99])
    if kind == FieldDescriptor.CPPTYPE_FLOAT:
        return struct.unpack("f", struct.pack("f", min(draw.choice(_FLOATS), 3e38)))[0]
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return draw.choice(_FLOATS)
    return _integer(draw, kind)


def _string(draw: random.Random, field: FieldDescriptor) -> str | bytes:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (
            picture_file(draw)
            if draw.random() < 0.5
            else draw.randbytes(draw.choice([0, 3, 16, 4096]))
        )
    if "url" in field.name:
        text = values.url(draw)
    elif field.name == "model":
        text = draw.choice(["", values.MODEL, values.text(draw)])
    elif field.name.endswith("_json") or field.name in _OF_JSON:
        text = forms.json_text(draw)
    elif field.name in _FORMS:
        text = _FORMS[field.name](draw)
    else:
        text = values.text(draw)
    return text.encode("utf-8", "replace").decode()  # others have no place in a message


def _integer(draw: random.Random, kind: int) -> int:
    bits, signed = {
        FieldDescriptor.CPPTYPE_INT32: (32, True),
        FieldDescriptor.CPPTYPE_UINT32: (32, False),
        FieldDescriptor.CPPTYPE_INT64: (64, True),
        FieldDescriptor.CPPTYPE_UINT64: (64, False),
    }[kind]
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return min(max(draw.choice(_INTEGERS), low), high)
