"""A video on the chat page of a whole system, where PyAV is installed: its frames become tokens of the prompt."""

from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.browser import ChatPage, open_browser
from tests.support.checkpoints import make_checkpoint
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


async def test_a_video_is_counted_answered_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("av")
    folder = make_checkpoint(tmp_path / "tiny", "qwen2_vl")
    with System(folder) as system:
        async with open_browser() as browser:
            chat = await ChatPage.open(browser, system.url)
            film = await chat.film()
            await chat.drop([("a.webm", "video/webm", film)])
            await expect(chat.page.locator(".file")).to_contain_text(" tokens")
            await chat.drop([("b.webm", "video/webm", film[: len(film) // 8])])
            await expect(chat.page.get_by_role("alert")).to_contain_text("b.webm: the video file")
            await expect(chat.page.locator(".file")).to_have_count(1)
            await chat.ask("What happens?")
            await chat.answered()
            await chat.page.reload()
            await expect(chat.page.locator(".gallery video")).to_have_js_property("videoWidth", 96)
            await chat.answered()
            assert chat.complaints == []
