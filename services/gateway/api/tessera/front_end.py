"""The pages for people, / and /system: files that `services/gateway/page` is built into."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from services.gateway.admission.caller import Caller
from services.gateway.errors import NoRoute
from services.gateway.http.exchange import Exchange

BUILT = Path(__file__).with_name("built")

# The pages run the scripts of this server alone, none within a page, and reach no other server. What they make of a
# model's answer becomes HTML through DOMPurify's policy or not at all (Trusted Types).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data: blob:; media-src data: blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types dompurify"
)
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
}
_SMALL = 1024  # bytes that are not worth packing


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: bytes

    @cached_property
    def packed(self) -> bytes:
        """The content as gzip has it."""
        return gzip.compress(self.content, mtime=0)


class FrontEnd:
    """The handlers of the pages and of the files that they load. All are read once, and no other file is reached."""

    def __init__(self) -> None:
        self._files: Mapping[str, _File] = {
            str(path.relative_to(BUILT)): _File(path.read_bytes(), _TYPES[path.suffix])
            for path in sorted(BUILT.rglob("*"))
            if path.suffix in _TYPES
        }

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """GET /: a page to talk with the model on."""
        await self._page(exchange, "index.html")

    async def system(self, exchange: Exchange, caller: Caller) -> None:
        """GET /system: a page that shows the services and what they do."""
        await self._page(exchange, "system.html")

    async def part(self, exchange: Exchange, caller: Caller) -> None:
        """GET /page/{id}: a script or style of these pages. Raises NoRoute."""
        file = self._files.get(exchange.path.removeprefix("/"))
        if file is None:
            raise NoRoute(
                "NO_SUCH_ROUTE", f"the pages have no file {exchange.path[:100]!r}: load them anew"
            )
        # Its name changes with its content.
        await _send(exchange, file, [(b"cache-control", b"public, max-age=31536000, immutable")])

    async def _page(self, exchange: Exchange, name: str) -> None:
        headers = [
            (b"cache-control", b"no-cache"),
            (b"content-security-policy", POLICY.encode()),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"referrer-policy", b"no-referrer"),
        ]
        await _send(exchange, self._files[name], headers)


async def _send(exchange: Exchange, file: _File, headers: list[tuple[bytes, bytes]]) -> None:
    headers += [(b"vary", b"Accept-Encoding"), (b"x-content-type-options", b"nosniff")]
    content = file.content
    offered = exchange.header("accept-encoding").split(",")
    if len(content) > _SMALL and "gzip" in [one.partition(";")[0].strip() for one in offered]:
        content = file.packed
        headers.append((b"content-encoding", b"gzip"))
    await exchange.respond(200, content, file.kind, headers)
