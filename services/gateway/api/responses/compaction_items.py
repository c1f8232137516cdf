"""Items of the type `compaction`: a summary, in the place of all that was said but by the user.

`encrypted_content` is for whoever sends it back alone, and needs no secret: what it says was said to the client by the
model, and a client may put anything into the mouth of a model anyway. It has a digest, so that what was cut off, or
comes from another server, is told from what this one wrote; any gateway reads it, also after a restart of Redis.
"""

import base64
import binascii
import hashlib

from services.gateway.decoding.bounds import wrong

TYPE = "compaction"
_BEGIN = "tessera.1."
_DIGEST_BYTES = 8
# What the model reads before a summary.
_HEAD = "Summary of what was said and done beside these messages of the user's:\n\n"


def closed(summary: str) -> str:
    """The `encrypted_content` of a summary."""
    content = summary.encode()
    return _BEGIN + base64.urlsafe_b64encode(_digest(content) + content).decode()


def opened(content: str | None, field: str) -> str:
    """The text that an item's `encrypted_content` stands for. Raises InvalidRequest naming `field`."""
    if content is None:
        raise wrong(field, "is missing")
    try:
        found = base64.b64decode(content.removeprefix(_BEGIN), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        found = b""
    digest, summary = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
    if not content.startswith(_BEGIN) or digest != _digest(summary):
        raise wrong(
            field, "is not what /v1/responses/compact of this server gave: send it unchanged"
        )
    return _HEAD + summary.decode(errors="replace")


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]
