"""Clients for servers without TLS."""

from typing import Any

import httpx


def plain_client(url: str = "", **options: Any) -> httpx.AsyncClient:
    """A client that does not load the machine's certificates, which takes 50 ms each time."""
    return httpx.AsyncClient(base_url=url, verify=False, **options)
