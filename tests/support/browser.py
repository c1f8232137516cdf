"""The pages in a real browser: Debian's Chromium, driven by Playwright."""

import asyncio
import base64
import contextlib
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, async_playwright, expect

ROOT = Path(__file__).parents[2]
AXE = ROOT / "services/gateway/page/node_modules/axe-core/axe.min.js"
_FLAGS = [
    "--no-sandbox",  # tests may run as root
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
_WAIT_MS = 60_000.0  # on a busy machine
# A canvas that turns from blue to red, as a browser records it.
_RECORD = """async () => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 96, height: 64 });
    const context = canvas.getContext("2d");
    const recorder = new MediaRecorder(canvas.captureStream(), { mimeType: "video/webm" });
    const parts = [];
    recorder.ondataavailable = ({ data }) => parts.push(data);
    const ended = new Promise((end) => (recorder.onstop = end));
    recorder.start();
    for (let shade = 0; shade < 256; shade += 15) {
        context.fillStyle = `rgb(${shade}, 0, ${255 - shade})`;
        context.fillRect(0, 0, canvas.width, canvas.height);
        await new Promise((wake) => setTimeout(wake, 40));
    }
    recorder.stop();
    await ended;
    const bytes = new Uint8Array(await new Blob(parts).arrayBuffer());
    return btoa(String.fromCharCode(...bytes));
}"""

expect.set_options(timeout=_WAIT_MS)


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Skips the test where there is no Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=_FLAGS)
        yield browser
        await browser.close()


@dataclass
class ChatPage:
    """The chat page as a person uses it. `complaints` is what the browser found wrong."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    @classmethod
    async def open(cls, browser: Browser, url: str, **options: Any) -> "ChatPage":
        """A fresh visitor's, with Playwright's `options` of a context."""
        context = await browser.new_context(**{"locale": "en-GB", **options})
        context.set_default_timeout(_WAIT_MS)
        chat = cls(await context.new_page())
        chat.page.on("console", chat._heard)
        chat.page.on("pageerror", lambda error: chat.complaints.append(str(error)))
        await chat.page.goto(url)
        return chat

    def _heard(self, message: ConsoleMessage) -> None:
        # A connection that breaks, and an error's status, are what tests bring about.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    @property
    def question(self) -> Locator:
        """The composer's field."""
        return self.page.locator("#question")

    @property
    def answers(self) -> Locator:
        """All answers that are shown."""
        return self.page.locator(".message.answer")

    @property
    def done(self) -> Locator:
        """The figures below answers, which complete ones have."""
        return self.page.locator("button.figures")

    async def ask(self, text: str) -> None:
        """Types a question and sends it."""
        await self.question.fill(text)
        await self.question.press("Enter")

    async def answered(self, count: int = 1) -> None:
        """Waits until so many answers are complete."""
        await expect(self.done).to_have_count(count)

    def button(self, name: str, *, exact: bool = True) -> Locator:
        """One by its accessible name."""
        return self.page.get_by_role("button", name=name, exact=exact)

    async def drop(self, files: Sequence[tuple[str, str, bytes]], *, paste: bool = False) -> None:
        """Drops files (name, type, bytes) on the page, or pastes them."""
        script = """([files, paste]) => {
            const transfer = new DataTransfer();
            for (const [name, type, data] of files) {
                const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
                transfer.items.add(new File([bytes], name, { type }));
            }
            const init = { bubbles: true, cancelable: true };
            if (paste) {
                document.dispatchEvent(new ClipboardEvent("paste", { ...init, clipboardData: transfer }));
                return;
            }
            for (const kind of ["dragenter", "dragover", "drop"])
                document.body.dispatchEvent(new DragEvent(kind, { ...init, dataTransfer: transfer }));
        }"""
        sent = [[name, kind, base64.b64encode(data).decode()] for name, kind, data in files]
        await self.page.evaluate(script, [sent, paste])

    async def film(self) -> bytes:
        """A short video in WebM, 96 by 64 pixels, which the browser records of itself."""
        return base64.b64decode(await self.page.evaluate(_RECORD))

    async def findings(self) -> list[str]:
        """What axe finds that is serious. Skips the test where npm has not brought axe."""
        if not AXE.exists():
            pytest.skip("there is no axe here (npm ci in services/gateway/page)")
        await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("() => axe.run()")
        return [
            f"{one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]


class Balancer:
    """A TCP proxy: each connection goes to the first of `ports` that takes it. Where none does, it is answered with a
    page of HTML, as proxies do."""

    PAGE = (
        b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 26\r\n"
        b"connection: close\r\n\r\n<html>502 Bad Gateway</html"
    )

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = list(ports)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def move(self, ports: Sequence[int]) -> None:
        """Goes to these from now on; connections break."""
        self.ports = list(ports)
        for task in self._open:
            task.cancel()

    async def __aenter__(self) -> "Balancer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._pass_on(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in self.ports:
            with contextlib.suppress(OSError):
                up = await asyncio.open_connection("127.0.0.1", port)
                break
        else:
            await reader.read(65536)
            writer.write(self.PAGE)
            await writer.drain()
            return
        pumps = [
            asyncio.create_task(_pump(reader, up[1])),
            asyncio.create_task(_pump(up[0], writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            up[1].close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
