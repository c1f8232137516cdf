"""Fetches media over http(s) under a policy: no private network, a limit of bytes, a limit of time.

Each name is resolved here, every address it has is checked, and the connection goes to the checked
address: a name that answers differently the second time (DNS rebinding) gains nothing. Redirects
are followed by the same rules.
"""

import asyncio
import re
import socket
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from services.preprocess.download.address_policy import is_public
from services.preprocess.download.host_clients import HostClients
from services.preprocess.download.name_resolver import NameResolver
from shared.errors import InvalidRequest

_MAX_REDIRECTS = 3
_LONGEST_URL = 8192
# Of a host name and of the parts between its dots, as the domain name system has them.
_LONGEST_NAME, _LONGEST_LABEL = 253, 63
_AUTHORITY_END = re.compile(r"[/?#]")


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

    def __init__(self, policy: FetchPolicy, tls: ssl.SSLContext | None = None) -> None:
        """`tls` verifies servers; by default against the public certificate authorities."""
        self._policy = policy
        self._clients = HostClients(policy.timeout_s, tls)
        self._resolver = NameResolver()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._resolver.close()
        await self._clients.close()

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
                f"{_short(url)} cannot be fetched: {_short(str(error)) or type(error).__name__}",
            ) from error

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        target = _parsed(url)
        for _ in range(_MAX_REDIRECTS + 1):
            answer = await self._get(target, max_bytes)
            if isinstance(answer, bytes):
                return answer
            target = _parsed(str(target.join(answer)))
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
        _check_name(url.raw_host.decode("ascii"))
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
        try:
            addresses = await self._resolver.resolve(url.raw_host.decode("ascii"), port)
        except socket.gaierror as error:
            raise InvalidRequest(
                "MEDIA_FETCH_FAILED", f"the name {url.host} does not resolve: {error.strerror}"
            ) from error
        if not self._policy.allow_private and not all(map(is_public, addresses)):
            # The address is not named, so that the answer does not map the private network for a client.
            raise InvalidRequest(
                "MEDIA_ADDRESS",
                f"{url.host} is not on the public internet; media are not fetched there",
            )
        return addresses

    async def _get_from(self, url: httpx.URL, address: str, max_bytes: int) -> bytes | str:
        async with self._clients.client(url) as client:
            request = client.build_request(
                "GET",
                url.copy_with(host=address),
                headers={"Host": url.netloc.decode("ascii")},
                # TLS is negotiated with, and its certificate checked against, the name.
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
            )
            response = await client.send(request, stream=True)
            try:
                return await self._answer(response, url, max_bytes)
            finally:
                await response.aclose()

    async def _answer(self, response: httpx.Response, url: httpx.URL, limit: int) -> bytes | str:
        location = response.headers.get("location")
        if response.is_redirect and location:
            return str(location)
        if response.status_code != 200:
            raise InvalidRequest(
                "MEDIA_FETCH_FAILED", f"{_short(str(url))} answered HTTP {response.status_code}"
            )
        return await self._read(response, url, limit)

    async def _read(self, response: httpx.Response, url: httpx.URL, limit: int) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > limit:
                raise InvalidRequest(
                    "MEDIA_TOO_LARGE", f"{_short(str(url))} is over the limit of {limit} bytes"
                )
        return bytes(body)


def _parsed(url: str) -> httpx.URL:
    """Raises InvalidRequest for URLs over the limit of length, before they are parsed."""
    if len(url) > _LONGEST_URL:
        raise InvalidRequest(
            "MEDIA_URL", f"{_short(url)} has {len(url)} characters, the limit is {_LONGEST_URL}"
        )
    # Checked before IDNA encoding, which takes quadratic time.
    authority = _AUTHORITY_END.split(url.split("//", 1)[-1], maxsplit=1)[0].rsplit("@", 1)[-1]
    if len(authority) > _LONGEST_NAME + len(":65535"):
        raise _bad_name(len(authority))
    return httpx.URL(url)


def _check_name(host: str) -> None:
    labels = host.rstrip(".").split(".")
    if len(host) > _LONGEST_NAME or max(map(len, labels)) > _LONGEST_LABEL:
        raise _bad_name(len(host))


def _bad_name(length: int) -> InvalidRequest:
    return InvalidRequest(
        "MEDIA_URL",
        f"the host name in the media's address has {length} characters; it may have {_LONGEST_NAME},"
        f" and {_LONGEST_LABEL} between two dots",
    )


def _short(url: str) -> str:
    return url if len(url) <= 120 else url[:117] + "..."
