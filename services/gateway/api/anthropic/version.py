"""The version of Anthropic's API, which clients name in a header."""

import re

from services.gateway.http.exchange import Exchange
from shared.errors import InvalidRequest

_HEADER = "anthropic-version"
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
# Replies of older versions have other forms. Newer clients name later ones, and read these.
_OLDEST = "2023-06-01"


def check_version(exchange: Exchange) -> None:
    """Raises InvalidRequest for a version with other replies than ours. Without the header it is one of ours."""
    given = exchange.header(_HEADER).strip()
    if given and not (_DATE.fullmatch(given) and given >= _OLDEST):
        raise InvalidRequest(
            "INVALID_HEADER",
            f"{_HEADER} must be {_OLDEST} or a later date, not {given[:24]!r}",
            field=_HEADER,
        )
