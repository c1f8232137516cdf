"""The pages for everybody: keys, errors in words, prefixes, languages, small screens, assistive technology."""

import gzip
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, Route, expect
from tokenizers import Tokenizer

from services.gateway.api.tessera.front_end import BUILT, POLICY
from tests.support.browser import ChatPage
from tests.support.gateway.stage import MODEL, Stage, open_stage
from tests.support.pictures import png


async def test_files_of_the_pages(stage: Stage) -> None:
    for path in ("/", "/system"):
        page = await stage.http.get(path)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"] == POLICY
        assert "'unsafe" not in POLICY and "http" not in POLICY
        # What the policy does not let run, and what would not work behind a prefix.
        assert not re.search(r"<style|<script>|<[^>]*\s(?:style|on\w+)=", page.text)
        parts = [one for one in re.findall(r'(?:src|href)="([^"]+)"', page.text) if one != "data:,"]
        assert parts and all(one.startswith("./page/") for one in parts)
        for part in parts:
            reply = await stage.http.get(part.removeprefix("."))
            assert "immutable" in reply.headers["cache-control"]
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["content-encoding"] == "gzip"
        plain = await stage.http.get(path, headers={"Accept-Encoding": "identity"})
        assert plain.text == page.text
    for wrong in ("/page/nothing.js", "/page/../endpoint.py", "/page/%2e%2e/index.html"):
        assert (await stage.http.get(wrong)).status_code == 404


def test_the_pages_stay_small() -> None:
    sizes = [len(gzip.compress(path.read_bytes())) for path in BUILT.rglob("*") if path.is_file()]
    assert sum(sizes) < 250_000


async def test_a_key_is_asked_for_and_not_shown(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, browser: Browser
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, api_key="sesame") as stage:
        chat = await ChatPage.open(browser, stage.gateway.url)
        field = chat.page.get_by_role("textbox", name="API key")
        await expect(field).to_have_attribute("type", "password")
        await field.fill("wrong")
        await field.press("Enter")
        await expect(
            chat.page.get_by_text("The server does not know this API key.")
        ).to_be_visible()
        await field.fill("sesame")
        await field.press("Enter")
        await expect(chat.page.locator(".model-name").first).to_have_text(MODEL)
        await chat.ask("What is there?")
        await chat.answered()
        where = "() => [sessionStorage['tessera.key'], localStorage['tessera.key']]"
        assert await chat.page.evaluate(where) == ["sesame", None]
        assert "sesame" not in await chat.page.content()
        # The page of the system has it too.
        await chat.page.get_by_role("link", name="System").click()
        await expect(chat.page.get_by_text("ready", exact=True)).to_be_visible()


async def test_errors_are_sentences(chat: ChatPage) -> None:
    page = chat.page

    async def answer(route: Route) -> None:
        await route.fulfill(status=404, content_type="text/html", body="<html>nginx</html>")

    await page.route("**/v1/chat/completions", answer)
    await chat.ask("What is there?")
    alert = chat.answers.get_by_role("alert")
    await expect(alert).to_contain_text("Something between this page and the server answered")
    await page.unroute("**/v1/chat/completions")
    await chat.button("Try again").click()
    await chat.answered()
    await page.route("**/v1/chat/completions", lambda route: route.abort())
    await chat.ask("And now?")
    await expect(chat.answers.last).to_contain_text("The connection broke")
    await page.unroute("**/v1/chat/completions")
    await chat.answered(2)  # by itself
    await chat.button("Settings").click()
    await page.get_by_label("Temperature").fill("9")
    await page.keyboard.press("Escape")
    await chat.ask("Hot")
    await expect(alert.last).to_contain_text("temperature must be between 0 and 2")
    assert "Unexpected token" not in await page.content()


async def test_behind_a_prefix(stage: Stage, browser: Browser) -> None:
    url = stage.gateway.url

    async def strip(route: Route) -> None:
        path = route.request.url.removeprefix(url)
        if not path.startswith("/llm/"):
            await route.fulfill(status=404, body="outside")
            return
        await route.fulfill(response=await route.fetch(url=url + path.removeprefix("/llm")))

    context = await browser.new_context(locale="en-GB")
    await context.route("**/*", strip)
    page = await context.new_page()
    await page.goto(f"{url}/llm/")
    chat = ChatPage(page)
    await chat.ask("What is there?")
    await chat.answered()
    await page.get_by_role("link", name="System").click()
    await expect(page.get_by_role("heading", name="Decoders")).to_be_visible()


async def test_it_speaks_chinese(stage: Stage, browser: Browser) -> None:
    chat = await ChatPage.open(browser, stage.gateway.url, locale="zh-CN")
    await expect(chat.button("新对话").first).to_be_visible()
    assert await chat.page.evaluate("() => document.documentElement.lang") == "zh-CN"
    await chat.button("设置").click()
    await chat.page.get_by_label("语言").select_option("en")
    await expect(chat.page.get_by_role("dialog", name="Settings")).to_be_visible()
    assert chat.complaints == []


async def test_keys_of_the_keyboard(chat: ChatPage) -> None:
    await chat.question.fill("one")
    await chat.question.press("Shift+Enter")
    await chat.question.press_sequentially("two")
    await expect(chat.question).to_have_value("one\ntwo")
    await chat.question.press("Enter")
    await chat.answered()
    await expect(chat.page.locator(".bubble")).to_have_text("one\ntwo")


async def test_a_phone_shows_all_within_its_width(stage: Stage, browser: Browser) -> None:
    stage.says(
        "A | B\n--|--\n" + "wide " * 40 + "| 2\n\n```\n" + "x" * 300 + "\n```\n\n" + "y" * 300, 9
    )
    options = {"viewport": {"width": 360, "height": 700}, "is_mobile": True, "has_touch": True}
    chat = await ChatPage.open(browser, stage.gateway.url, **options)
    await chat.ask("What is there?")
    await chat.answered()
    width = "() => document.documentElement.scrollWidth"
    assert await chat.page.evaluate(width) == 360
    await expect(chat.page.locator(".sidebar")).to_be_hidden()
    await chat.button("Conversations").click()
    await expect(chat.page.locator(".entry .title")).to_have_text("What is there?")
    await chat.page.goto(f"{stage.gateway.url}/system")
    await expect(chat.page.get_by_role("heading", name="Decoders")).to_be_visible()
    assert await chat.page.evaluate(width) == 360


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
async def test_axe_finds_nothing_serious(stage: Stage, browser: Browser, scheme: str) -> None:
    stage.says("# Title\n\n```python\ndef f(): return 'x' # y\n```\n\n| a |\n|---|\n| 1 |", 9)
    options = {"color_scheme": scheme, "bypass_csp": True, "reduced_motion": "reduce"}
    chat = await ChatPage.open(browser, stage.gateway.url, **options)
    await expect(chat.page.locator(".example").first).to_be_visible()
    assert await chat.findings() == []
    await chat.drop([("a.png", "image/png", png(1)), ("d.svg", "image/svg+xml", b"<svg/>")])
    await expect(chat.page.locator(".file")).to_have_count(1)
    await chat.ask("What is there?")
    await chat.answered()
    await expect(chat.answers.locator(".hljs-keyword").first).to_be_visible()
    assert await chat.findings() == []
    await chat.done.click()
    assert await chat.findings() == []
    await chat.page.keyboard.press("Escape")
    await chat.button("Settings").click()
    assert await chat.findings() == []
    await chat.page.goto(f"{stage.gateway.url}/system")
    await expect(chat.page.get_by_role("heading", name="Decoders")).to_be_visible()
    assert await chat.findings() == []
