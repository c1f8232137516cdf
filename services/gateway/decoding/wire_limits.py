"""A limit on the number of values in a protobuf message, checked before it is parsed: two bytes on the wire may
become an object of a hundred bytes in memory.
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from services.gateway.decoding.json_limits import MOST_VALUES
from shared.errors import InvalidRequest

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CONTINUED = bytes(range(128, 256))
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_message(raw: bytes, kind: Descriptor) -> None:
    """Raises InvalidRequest for what holds more values than a JSON body may, or is no protobuf."""
    if len(raw) <= MOST_VALUES // 16:
        return
    try:
        _count(raw, 0, len(raw), kind, 0)
    except IndexError:
        raise malformed(kind) from None


def malformed(kind: Descriptor) -> InvalidRequest:
    """The error for bytes that are no such message."""
    return InvalidRequest("MALFORMED_MESSAGE", f"these bytes are no {kind.full_name}")


def _count(raw: bytes, at: int, end: int, kind: Descriptor, found: int) -> int:
    """`found` and the values of a message of this kind at [at, end)."""
    while at < end:
        tag, at = _varint(raw, at)
        found += 1
        wire = tag & 7
        if wire == _VARINT:
            _, at = _varint(raw, at)
        elif wire == _FIXED64:
            at += 8
        elif wire == _FIXED32:
            at += 4
        elif wire == _BYTES:
            size, at = _varint(raw, at)
            field = kind.fields_by_number.get(tag >> 3)
            if at + size > end:
                raise malformed(kind)
            if field is not None and field.message_type is not None:
                found = _count(raw, at, at + size, field.message_type, found)
            elif field is not None and field.type not in _TEXTS:  # packed numbers
                found += len(raw[at : at + size].translate(None, _CONTINUED))
            at += size
        else:
            raise malformed(kind)
        if found > MOST_VALUES:
            raise InvalidRequest(
                "BODY_TOO_RICH",
                f"the message holds more than {MOST_VALUES} values: send less at once",
            )
    return found


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
