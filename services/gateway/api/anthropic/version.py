"""The version of Anthropic's API, which clients name in a header."""

from services.gateway.http.exchange import Exchange
from shared.errors import InvalidRequest

_HEADER = "anthropic-version"
_VERSION = "2023-06-01"


def check_version(exchange: Exchange) -> None:
    """Raises InvalidRequest for a version with other replies than ours. Without the header it is ours."""
    given = exchange.header(_HEADER).strip()
    if given not in ("", _VERSION):
        raise InvalidRequest(
            "INVALID_HEADER", f"{_HEADER} must be {_VERSION}, not {given[:24]!r}", field=_HEADER
        )
