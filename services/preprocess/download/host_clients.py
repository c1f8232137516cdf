"""An HTTP client for each host, because the connections of one are pooled by address: two names that live at one
address must share neither a connection, whose certificate was checked for one of them, nor cookies.
"""

import contextlib
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

_MOST = 64
_HEADERS = {
    "User-Agent": "tessera-preprocess",
    "Accept": "image/*, video/*",
    # The limit of bytes applies to what arrives: compressed bodies could unpack to more.
    "Accept-Encoding": "identity",
}


class _Entry:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.users = 0


class HostClients:
    """HTTP clients by scheme, host and port; unused ones are closed, least recently used first."""

    def __init__(self, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        self._timeout_s = timeout_s
        self._tls = tls or httpx.create_ssl_context(trust_env=False)
        self._entries: OrderedDict[tuple[str, str, int | None], _Entry] = OrderedDict()

    @contextlib.asynccontextmanager
    async def client(self, url: httpx.URL) -> AsyncIterator[httpx.AsyncClient]:
        """The client for the URL's host, which is not closed meanwhile."""
        key = (url.scheme, url.host, url.port)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(self._make())
        self._entries.move_to_end(key)
        entry.users += 1
        try:
            yield entry.client
        finally:
            entry.users -= 1
            await self._drop()

    async def close(self) -> None:
        """Closes all of them."""
        entries, self._entries = self._entries, OrderedDict()
        for entry in entries.values():
            await entry.client.aclose()

    async def _drop(self) -> None:
        idle = [key for key, entry in self._entries.items() if not entry.users]
        gone = [self._entries.pop(key) for key in idle[: max(0, len(self._entries) - _MOST)]]
        for entry in gone:
            await entry.client.aclose()

    def _make(self) -> httpx.AsyncClient:
        # No proxy and no netrc from the environment: the address that was checked is the one that
        # is dialled.
        return httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,
            follow_redirects=False,
            timeout=self._timeout_s,
            headers=_HEADERS,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
