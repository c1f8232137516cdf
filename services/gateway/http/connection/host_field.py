"""The Host field of a request: RFC 9112, 3.2 asks for 400 where it is missing, repeated or no host.

A proxy that goes by another Host than the server does would pass a request on to the wrong one.
"""

import re
from collections.abc import Iterable

_VERSION_WITHOUT = "1.0"
# RFC 3986, 3.2.2 and 3.2.3: a name or an address, and a port; empty where the address of the request has no host.
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%~_-]*\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?")


def host_fault(version: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What is wrong with the Host of a request of HTTP/`version`, whose header names are in lower case; empty for
    nothing."""
    hosts = [value.strip(b" \t") for name, value in headers if name == b"host"]
    if not hosts:
        return "" if version == _VERSION_WITHOUT else "the request has no Host header"
    if len(hosts) > 1:
        return "the request has several Host headers: send one"
    return "" if _HOST.fullmatch(hosts[0]) else "the Host header is no name or address of a host"
