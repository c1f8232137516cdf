"""The version of Anthropic's API, which clients name in a header."""

from services.gateway.http.exchange import Exchange
from shared.errors import InvalidRequest

_HEADER = "anthropic-version"
# Their replies are alike. The later one refuses fields that the earlier one has; here they are taken by both.
_VERSIONS = ("2023-06-01", "2026-10-21")


def check_version(exchange: Exchange) -> None:
    """Raises InvalidRequest for a version with other replies than ours. Without the header it is one of ours."""
    given = exchange.header(_HEADER).strip()
    if given and given not in _VERSIONS:
        raise InvalidRequest(
            "INVALID_HEADER",
            f"{_HEADER} must be {' or '.join(_VERSIONS)}, not {given[:24]!r}",
            field=_HEADER,
        )
