"""The chat page of a gateway in a real browser."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.support.browser import ChatPage, open_browser
from tests.support.gateway.stage import Stage


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as opened:
        yield opened


@pytest.fixture
async def chat(stage: Stage, browser: Browser) -> AsyncIterator[ChatPage]:
    opened = await ChatPage.open(browser, stage.gateway.url)
    yield opened
    assert opened.complaints == []
