"""Items that a request names by the ids that responses gave them."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.api.responses.kept import KeptResponses
from services.gateway.api.responses.schema import Item
from services.gateway.decoding.bounds import at_most, wrong
from services.gateway.decoding.decode import off_loop
from services.gateway.decoding.list_limits import MOST_MESSAGES
from services.gateway.decoding.typed import decoder_of
from shared.errors import InvalidRequest, NotFound

_TYPE = "item_reference"
_REFERENCE = re.compile(rb'"type"\s*:\s*"item_reference"')
_NAME = re.compile(r"[a-z]{2,3}_(r_[0-9a-f]{8}_[0-9a-f]{32})_[0-9]{1,9}")


def refers(given: bytes) -> bool:
    """Whether an input as JSON may name items."""
    return _REFERENCE.search(given) is not None


class _Reference(msgspec.Struct):
    """What is read of an item to learn whether it is a name, and of what."""

    type: Any = None
    id: Any = None


async def resolved(given: bytes, kept: KeptResponses, tenant: str) -> bytes:
    """An input as JSON with items in the places of their names. Raises InvalidRequest naming the field."""
    items, references = await off_loop(_read, given)
    outputs: dict[str, Mapping[str, Any]] = {}
    for index, name in references.items():
        item = await _named(name, f"input[{index}].id", outputs, kept, tenant)
        items[index] = msgspec.Raw(msgspec.json.encode(item))
    return msgspec.json.encode(items) if references else given


def _read(given: bytes) -> tuple[list[msgspec.Raw], dict[int, Any]]:
    """The items, and which of them are names; none of an input that is no list of objects: its reader says why."""
    try:
        items = decoder_of(list[msgspec.Raw]).decode(given)
        at_most("input", len(items), MOST_MESSAGES)
        read = [decoder_of(_Reference).decode(item) for item in items]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [], {}
    return items, {index: item.id for index, item in enumerate(read) if item.type == _TYPE}


async def _named(
    name: Any,
    field: str,
    outputs: dict[str, Mapping[str, Any]],
    kept: KeptResponses,
    tenant: str,
) -> Any:
    """The item of a name; `outputs` has those of responses that have been read."""
    if not isinstance(name, str):
        raise wrong(field, "is not a string", "ITEM_NOT_FOUND")
    shape = _NAME.fullmatch(name)
    if shape is not None and name not in outputs:
        try:
            found = await kept.find(shape[1], tenant)
        except NotFound as error:
            message = f"{field}: {error.message}"
            raise InvalidRequest("ITEM_NOT_FOUND", message, field=field) from None
        response = json.loads(await kept.now(found))
        outputs |= {item["id"]: item for item in response["output"]}
    if name not in outputs:
        raise wrong(field, f"{name[:64]!r} names no item of a response", "ITEM_NOT_FOUND")
    return outputs[name]


def merge_resolved(items: list[Item], given: bytes) -> None:
    """Puts the items that a resolved input has in the places of their names."""
    for index, item in enumerate(decoder_of(list[msgspec.Raw]).decode(given)):
        if items[index].type == _TYPE:
            items[index] = decoder_of(Item).decode(item)
