"""The caller of a request, and the tenant that it is counted for."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

# The value of a header, or of metadata of gRPC, by its name in lower case; "" if absent.
Header = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Caller:
    """One call: the request's id, the API key if keys are in use or else the bearer token that came,
    the trace, and the arrival by the local monotonic clock.
    """

    request_id: str
    api_key: str = field(default="", repr=False)
    bearer: str = field(default="", repr=False)
    traceparent: str = ""
    arrived_at: float = 0.0
    # The client's own id of the request; empty if it has none.
    client_request_id: str = ""
    # Whose call it is, where the gateway makes it for somebody.
    tenant: str | None = None


def tenant_of(caller: Caller, user: str) -> str:
    """The tenant: from a checked API key, else `user`, else an unchecked bearer token; else empty.

    Keys and names become digests: tenants stand in Redis keys and in logs.
    """
    if caller.tenant is not None:
        return caller.tenant
    names = (("k", caller.api_key), ("u", user), ("b", caller.bearer))
    for kind, name in names:
        if name:
            return kind + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return ""
