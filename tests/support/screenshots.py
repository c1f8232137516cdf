"""`python -m tests.support.screenshots [folder]`: takes the pictures of docs/images anew, from a system of its own.

With a folder it leaves the documents as they are, and writes both pages into it, light, dark and as a phone has them.
"""

import asyncio
import contextlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import PIL.Image
from playwright.async_api import Browser

from tests.support.browser import ChatPage, open_browser
from tests.support.pictures import data_url, png
from tests.support.processes.system import System

_IMAGES = Path(__file__).parents[2] / "docs/images"
_MODEL = "tessera-demo"
_STREAMS = 24
_SECONDS = 75  # of load before the picture of the system, whose curves grow while it is open
_COLOURS = 256
_DOCUMENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chat": ("chat", {"viewport": {"width": 1100, "height": 720}}),
    "system": ("system", {"viewport": {"width": 1100, "height": 800}, "color_scheme": "dark"}),
}
_PHONE = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True}
_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "light": {"viewport": {"width": 1100, "height": 800}},
    "dark": {"viewport": {"width": 1100, "height": 800}, "color_scheme": "dark"},
    "phone": _PHONE,
    "phone-dark": {**_PHONE, "color_scheme": "dark", "locale": "zh-CN"},
}
_VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    f"{page}-{name}": (page, options)
    for page in ("chat", "system")
    for name, options in _LOOKS.items()
}


async def take(folder: Path, wanted: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Writes a picture for each name."""
    with System(None, "--decoders", "2", "--vision-encoders", "2") as system:
        async with open_browser() as browser:
            for name, (what, options) in wanted.items():
                if what == "chat":
                    _write(folder / f"{name}.png", await _chat(browser, system, options))
            load = asyncio.create_task(_load(system))
            looks = {name: options for name, (what, options) in wanted.items() if what == "system"}
            url = f"{system.url}/system"
            opened = {name: await ChatPage.open(browser, url, **looks[name]) for name in looks}
            await asyncio.sleep(_SECONDS)
            for name, page in opened.items():
                _write(folder / f"{name}.png", await page.page.screenshot(full_page=True))
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load


async def _chat(browser: Browser, system: System, options: Mapping[str, Any]) -> bytes:
    chat = await ChatPage.open(browser, system.url, **options)
    await chat.page.locator(".example").first.click()
    await chat.answered()
    await chat.ask("How many shapes are there?")
    await chat.answered(2)
    await chat.page.mouse.move(5, 400)  # nothing is hovered over
    await chat.page.wait_for_timeout(700)
    return await chat.page.screenshot()


async def _load(system: System) -> None:
    """Streams that come and go, pictures among them, and a request that is refused now and then."""
    async with openai.AsyncOpenAI(base_url=system.base_url, api_key="none") as client:

        async def one(number: int) -> None:
            turn = number
            while True:
                turn += _STREAMS
                content: Any = f"Tell me about {turn} circles."
                if turn % 3 == 0:
                    picture = {"type": "image_url", "image_url": {"url": data_url(png(turn % 40))}}
                    content = [picture, {"type": "text", "text": "What is in the picture?"}]
                size = 200 + 37 * turn % 600
                await client.chat.completions.create(
                    model=_MODEL,
                    messages=[{"role": "user", "content": content}],
                    max_tokens=size,
                    extra_body={"ignore_eos": True},
                )
                await asyncio.sleep(turn % 5)

        async def wrong() -> None:
            while True:
                for wrong in ({"temperature": 9}, {"max_tokens": 10**6}):
                    with contextlib.suppress(openai.BadRequestError):
                        await client.chat.completions.create(
                            model=_MODEL,
                            messages=[{"role": "user", "content": "Hello"}],
                            extra_body=wrong,
                        )
                    await asyncio.sleep(25)

        await asyncio.gather(wrong(), *(one(number) for number in range(_STREAMS)))


def _write(path: Path, png: bytes) -> None:
    """With few colours a picture has a third of the bytes."""
    picture = PIL.Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(_COLOURS, dither=PIL.Image.Dither.NONE).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(take(Path(sys.argv[1]), _VARIANTS))
    else:
        asyncio.run(take(_IMAGES, _DOCUMENTS))
