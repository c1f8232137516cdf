"""Who asks, and who pays."""

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the request's name, the API key if keys are in use or else whatever bearer token
    came, the trace, and the arrival by our own clock.
    """

    request_id: str
    api_key: str = field(default="", repr=False)
    bearer: str = field(default="", repr=False)
    traceparent: str = ""
    arrived_at: float = 0.0
    # What the client calls the request; empty if it does not.
    client_request_id: str = ""


def tenant_of(caller: Caller, user: str) -> str:
    """Who pays: a checked API key, else `user`, else an unchecked bearer token, else nobody in
    particular.

    Keys and names become digests: tenants stand in Redis keys and in logs.
    """
    names = (("k", caller.api_key), ("u", user), ("b", caller.bearer))
    for kind, name in names:
        if name:
            return kind + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return ""
