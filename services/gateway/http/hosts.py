"""Which Host names a gateway accepts, and from which pages it accepts a POST.

A gateway on loopback without a key trusts every caller, and its user's browser calls it for any page on the web: a page
whose name resolves to 127.0.0.1 (DNS rebinding) has the gateway's own origin, and a form is posted without a preflight.
"""

import functools
from collections.abc import Collection

from services.gateway.errors import Forbidden
from services.gateway.http.exchange import Exchange
from shared.access import is_loopback


class Hosts:
    """Which hosts and origins a request may name."""

    def __init__(self, listen: str, *, has_keys: bool, allowed: Collection[str]) -> None:
        """`listen` is the address of the REST API; `allowed` are names beside those of loopback, "*" is any. Without
        `allowed`, names are checked only on a loopback address without keys.
        """
        self._allowed = frozenset(name.lower() for name in allowed)
        self._checks = bool(allowed) or (is_loopback(listen) and not has_keys)

    def check(self, exchange: Exchange) -> None:
        """Raises Forbidden for a name that is not allowed. A client that names none is no browser."""
        host = exchange.header("host")
        if not self._checks or not host or "*" in self._allowed:
            return
        name = _name(host)
        if not _is_own(name) and name not in self._allowed:
            raise Forbidden(
                "HOST_NOT_ALLOWED",
                f"this gateway does not answer to the name {name[:100]!r}: call it by a name of --allowed-hosts,"
                " or as localhost",
            )

    def check_origin(self, exchange: Exchange, *, may_call: bool) -> None:
        """Raises Forbidden for a POST that a page of another origin could make without asking: any that is not JSON.
        `may_call`: the page is one of --cors-allow-origins.
        """
        origin = exchange.header("origin")
        if exchange.method != "POST" or not origin or may_call:
            return
        if origin.partition("://")[2] == exchange.header("host"):
            return
        if exchange.header("content-type").partition(";")[0].strip().lower() != "application/json":
            raise Forbidden(
                "ORIGIN_NOT_ALLOWED",
                f"a page of {origin[:100]!r} may not post here: name its origin in --cors-allow-origins",
            )


@functools.lru_cache(maxsize=256)
def _is_own(name: str) -> bool:
    """Whether a name or an address in a request is this machine's own, without asking a name server."""
    return name.endswith(".localhost") or is_loopback(name)


def _name(host: str) -> str:
    """The Host header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):  # [::1]:8000
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
