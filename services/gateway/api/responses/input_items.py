"""GET /v1/responses/{id}/input_items: what a response was asked, page by page."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.decoding.bounds import whole, wrong

_MOST = 100
_USUAL = 20
_ORDERS = ("", "asc", "desc")


def page_of_items(asked: Sequence[tuple[str, bytes]], query: Callable[[str], str]) -> bytes:
    """A list of items as JSON. `asked`: requests and what they sent as JSON; `query` gives parameters of the address.
    Raises InvalidRequest naming the parameter.
    """
    items = [item for request_id, given in asked for item in _items(request_id, json.loads(given))]
    order = query("order")
    if order not in _ORDERS:
        raise wrong("order", "must be asc or desc")
    if order != "asc":
        items.reverse()
    limit = _limit(query("limit"))
    after = query("after")
    if after:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise wrong("after", f"must be the id of an item, not {after[:64]!r}")
        items = items[places[0] + 1 :]
    page = items[:limit]
    content = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    return compact(content).encode()


def _items(request_id: str, given: Any) -> list[Mapping[str, Any]]:
    if given is None:
        return []
    listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [listed_item(f"in_{request_id}_{index}", item) for index, item in enumerate(listed)]


def listed_item(name: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item with an id and a type, its text in a part."""
    found = {"id": name, "type": "message", **{key: v for key, v in item.items() if v is not None}}
    if found["type"] == "message":
        found.setdefault("status", "completed")
        if isinstance(found.get("content"), str):
            kind = "output_text" if found.get("role") == "assistant" else "input_text"
            part = {"type": kind, "text": found["content"]}
            found["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
    return found


def _limit(given: str) -> int:
    if not given:
        return _USUAL
    if not (given.isascii() and given.isdigit()):
        raise wrong("limit", f"must be a whole number, not {given[:24]!r}")
    return whole("limit", int(given[:9]), 1, _MOST) or _USUAL
