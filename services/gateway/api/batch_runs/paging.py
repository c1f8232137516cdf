"""Lists that are given a page at a time."""

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.decoding.bounds import text, whole, wrong

_LONGEST_ID = 64
_ORDERS = ("", "asc", "desc")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What the address asks for: at most `limit` behind `after`, which is empty for the first page."""

    after: str
    limit: int
    oldest_first: bool


def read_page(
    query: Callable[[str], str], usual: int, most: int, cursor: str = "after"
) -> PageRequest:
    """The parameters of an address; `cursor` is the name of one. Raises InvalidRequest naming one."""
    order = query("order")
    if order not in _ORDERS:
        raise wrong("order", f"must be asc or desc, not {order[:24]!r}")
    after = text(cursor, query(cursor), _LONGEST_ID)
    given = query("limit")
    if given and not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise wrong("limit", f"must be a whole number, not {given[:24]!r}")
    limit = whole("limit", int(given), 1, most) if given else usual
    return PageRequest(after, limit or usual, order == "asc")
