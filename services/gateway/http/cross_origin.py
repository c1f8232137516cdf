"""Which web pages of other origins may read answers (CORS). None, unless the operator names them."""

from collections.abc import Collection

from services.gateway.http.exchange import Exchange

# Clients of a browser read these beside what every page may read.
_EXPOSED = b"x-request-id, request-id, x-tessera-request-id, retry-after"
_KEPT_S = b"600"


class CrossOrigin:
    """The CORS headers for requests that pages of other origins make. No cookies: keys stand in a
    header, which the page itself must set.
    """

    def __init__(self, origins: Collection[str]) -> None:
        """`origins` such as "https://chat.example.org"; "*" is every page."""
        self._origins = frozenset(origins)

    def headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """Headers of every response to the request."""
        if not self._origins:
            return []
        any_page = "*" in self._origins
        vary = [] if any_page else [(b"vary", b"Origin")]
        if not self.may_call(exchange):
            return vary
        origin = b"*" if any_page else exchange.header("origin").encode("latin-1")
        exposed = (b"access-control-expose-headers", _EXPOSED)
        return [(b"access-control-allow-origin", origin), exposed, *vary]

    async def preflight(self, exchange: Exchange, methods: Collection[str]) -> bool:
        """Answers where the request is a browser's question whether a page may call a route that has
        these methods. For other pages nothing is answered here.
        """
        asks = exchange.method == "OPTIONS" and exchange.header("access-control-request-method")
        if not asks or not self.may_call(exchange):
            return False
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", _KEPT_S),
            (b"vary", b"Access-Control-Request-Headers"),
        ]
        # A star would not mean Authorization.
        if wanted := exchange.header("access-control-request-headers"):
            headers.append((b"access-control-allow-headers", wanted.encode("latin-1")))
        await exchange.respond(200, b"", headers=headers)
        return True

    def may_call(self, exchange: Exchange) -> bool:
        """Whether the request comes from a page that the operator has named."""
        origin = exchange.header("origin")
        return bool(origin) and not self._origins.isdisjoint(("*", origin))
