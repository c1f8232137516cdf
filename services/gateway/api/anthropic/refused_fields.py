"""Fields of Anthropic's that ask for what is not offered. Clients send them with values that ask for nothing too."""

from collections.abc import Mapping
from typing import Any

from services.gateway.api.anthropic.schema import CountBody
from services.gateway.decoding.bounds import wrong
from services.gateway.reading.fields.unsupported import is_off, unsupported

# What a client is told that wants its conversation kept here; by this it knows to send all of it each time.
THREADS = "THREADS_NOT_OFFERED"
# Of each field what is said, and the values that ask for nothing beside null.
_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "container": ("names one, and this server runs no code: leave it out", ()),
    "mcp_servers": ("names tools that this server does not call: leave it out or send []", ([],)),
    "compaction": ("asks for a summary: leave it out", ()),
    "fallbacks": ("names other models, and this server has one: leave it out or send []", ([],)),
    "speed": ('must be "standard": all requests are answered as fast as can be', ("standard",)),
    "inference_geo": ("is not known to this server: leave it out", ()),
    "diagnostics": ("is not offered: leave it out", ({},)),
    "billing_policy": ("is not known to this server: leave it out", ()),
    "fallback_credit_token": ("is not known to this server: leave it out", ()),
}


def refuse_fields(body: CountBody) -> None:
    """Raises InvalidRequest for the first field that asks for something."""
    for name, (message, off) in _REFUSED.items():
        if not is_off(getattr(body, name), *off):
            raise unsupported(name, message)
    if not is_off(body.thread):
        raise wrong("thread", "is not offered: send the whole conversation without it", THREADS)
