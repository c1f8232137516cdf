"""Fetches media over http(s) under a policy: no private network, a limit of bytes, a limit of time.

Each name is resolved here, every address it has is checked, and the connection goes to the checked
address: a name that answers differently the second time (DNS rebinding) gains nothing. Redirects
are followed by the same rules.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from services.preprocess.address_policy import is_public
from shared.errors import InvalidRequest

_MAX_REDIRECTS = 3
_HEADERS = {
    "User-Agent": "tessera-preprocess",
    "Accept": "image/*, video/*",
    # Compressed bodies would make the limit of bytes one on what is sent, not on what arrives.
    "Accept-Encoding": "identity",
}


@dataclass(frozen=True)
class FetchPolicy:
    """What may be fetched. An empty list of domains allows all; ".example.org" allows subdomains."""

    timeout_s: float
    allowed_domains: tuple[str, ...] = ()
    allow_private: bool = False

    def allows(self, host: str) -> bool:
        """Whether the list of domains permits a host."""
        host = host.lower().rstrip(".")
        return not self.allowed_domains or any(
            host == domain or (domain.startswith(".") and host.endswith(domain))
            for domain in self.allowed_domains
        )


class MediaFetcher:
    """Fetches files under one policy. Enter it before use."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        # No proxy and no netrc from the environment: the address that was checked is the one that
        # is dialled.
        self._client = httpx.AsyncClient(
            trust_env=False, follow_redirects=False, timeout=policy.timeout_s, headers=_HEADERS
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """The bytes behind an http(s) URL. Raises InvalidRequest when policy, size, time or the server forbid it."""
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await self._follow(url, max_bytes)
        except TimeoutError:
            raise InvalidRequest(
                "MEDIA_TIMEOUT", f"{_short(url)} took longer than {self._policy.timeout_s:g} s"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise InvalidRequest(
                "MEDIA_FETCH_FAILED",
                f"{_short(url)} cannot be fetched: {error or type(error).__name__}",
            ) from error

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        target = httpx.URL(url)
        for _ in range(_MAX_REDIRECTS + 1):
            answer = await self._get(target, max_bytes)
            if isinstance(answer, bytes):
                return answer
            target = target.join(answer)
        raise InvalidRequest(
            "MEDIA_FETCH_FAILED", f"{_short(url)} redirects more than {_MAX_REDIRECTS} times"
        )

    async def _get(self, url: httpx.URL, max_bytes: int) -> bytes | str:
        """The body, or where to look instead."""
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidRequest(
                "MEDIA_URL", f"{_short(str(url))}: only http, https and data URLs are taken"
            )
        if not self._policy.allows(url.host):
            raise InvalidRequest(
                "MEDIA_DOMAIN",
                f"media from {url.host} are not allowed here (--allowed-media-domains)",
            )
        addresses = await self._checked_addresses(url)
        for index, address in enumerate(addresses):
            try:
                return await self._get_from(url, address, max_bytes)
            except httpx.ConnectError:
                if index == len(addresses) - 1:
                    raise
        raise AssertionError("a resolved name has an address")

    async def _checked_addresses(self, url: httpx.URL) -> list[str]:
        port = url.port or (443 if url.scheme == "https" else 80)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise InvalidRequest(
                "MEDIA_FETCH_FAILED", f"the name {url.host} does not resolve: {error.strerror}"
            ) from error
        addresses: Sequence[str] = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not self._policy.allow_private and not all(map(is_public, addresses)):
            # The address is not named: the answer must not map a network for a stranger.
            raise InvalidRequest(
                "MEDIA_ADDRESS",
                f"{url.host} is not on the public internet; media are not fetched there",
            )
        return list(addresses)

    async def _get_from(self, url: httpx.URL, address: str, max_bytes: int) -> bytes | str:
        request = self._client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={"Host": url.netloc.decode("ascii")},
            # TLS is negotiated with, and its certificate checked against, the name.
            extensions={"sni_hostname": url.host},
        )
        response = await self._client.send(request, stream=True)
        try:
            location = response.headers.get("location")
            if response.is_redirect and location:
                return str(location)
            if response.status_code != 200:
                raise InvalidRequest(
                    "MEDIA_FETCH_FAILED", f"{_short(str(url))} answered HTTP {response.status_code}"
                )
            return await self._read(response, url, max_bytes)
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response, url: httpx.URL, limit: int) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > limit:
                raise InvalidRequest(
                    "MEDIA_TOO_LARGE", f"{_short(str(url))} is over the limit of {limit} bytes"
                )
        return bytes(body)


def _short(url: str) -> str:
    return url if len(url) <= 120 else url[:117] + "..."
