"""A page that this server has: its bytes, and what browsers let it do."""

import base64
import hashlib
import re
from pathlib import Path

from services.gateway.http.exchange import Exchange

_HTML = b"text/html; charset=utf-8"


class Page:
    """A file of HTML that needs its own script and style, and this server, and nothing else."""

    def __init__(self, file: Path) -> None:
        self._content = file.read_bytes()
        self._headers = [(b"content-security-policy", policy_of(self._content.decode()).encode())]

    async def send(self, exchange: Exchange) -> None:
        """Answers with it."""
        await exchange.respond(200, self._content, _HTML, self._headers)


def policy_of(page: str) -> str:
    """Its Content-Security-Policy: a script or style that is not in its source does not run, and it reaches no other
    server.
    """
    script, style = (
        " ".join(_digest(text) for text in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
