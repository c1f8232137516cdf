"""Conversations: kept, branched, stopped, and gone on with by themselves."""

import asyncio
import json
import re
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route, expect

from tests.support.browser import Balancer, ChatPage
from tests.support.gateway.process import beside
from tests.support.gateway.stage import ANSWER, Stage


def asked(page: Page) -> list[dict[str, Any]]:
    """The bodies of chats that a page sends from now on."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: (
            bodies.append(json.loads(request.post_data or "{}"))
            if request.url.endswith("/v1/chat/completions")
            else None
        ),
    )
    return bodies


class Gate:
    """Lets a scheduler's steps through, some at once and the others one by one."""

    def __init__(self, stage: Stage, free: int) -> None:
        self._free, self._open = free, asyncio.Event()
        stage.scheduler.step = self._wait

    async def _wait(self, rid: str, index: int) -> None:
        if index >= self._free:
            await self._open.wait()

    def open(self) -> None:
        self._open.set()


async def test_a_question_may_be_quicker_than_the_list_of_models(chat: ChatPage) -> None:
    sent, told = asked(chat.page), asyncio.Event()

    async def late(route: Route) -> None:
        await told.wait()
        await route.continue_()

    await chat.page.route("**/v1/models", late)
    await chat.page.reload()
    await chat.ask("Already?")
    await expect(chat.answers).to_have_count(1)
    assert sent == []
    told.set()
    await chat.answered()
    assert [body["model"] for body in sent] == ["tiny-vl"]


async def test_turns_are_sent_along_and_kept_over_a_reload(chat: ChatPage) -> None:
    bodies = asked(chat.page)
    await chat.ask("What is there?")
    await chat.answered()
    await chat.ask("And who?")
    await chat.answered(2)
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And who?"},
    ]
    await chat.page.reload()
    await expect(chat.answers).to_have_count(2)
    await expect(chat.answers.last).to_contain_text(ANSWER)


async def test_conversations_are_found_named_exported_and_deleted(chat: ChatPage) -> None:
    page = chat.page
    for question in ("Where is Łódź?", "Who was Ada?"):
        await chat.button("New conversation").first.click()
        await chat.ask(question)
        await chat.answered()
    entries = page.locator(".entry")
    await expect(entries).to_have_count(2)
    await page.get_by_role("searchbox").fill("łódź")
    await expect(entries).to_have_count(1)
    await entries.locator(".title").click()
    await chat.button("Rename").click()
    await page.get_by_role("textbox", name="Rename").fill("Cities")
    await page.keyboard.press("Enter")
    await page.get_by_role("searchbox").fill("")
    await expect(entries.first).to_have_text(re.compile("Who was Ada|Cities"))
    await expect(page.locator(".entry.current .title")).to_have_text("Cities")

    async with page.expect_download() as waiting:
        await chat.button("Export as JSON").click()
    exported = json.loads((await (await waiting.value).path()).read_text())
    assert exported["title"] == "Cities"
    assert [node["text"] for node in exported["nodes"]] == ["Where is Łódź?", ANSWER]
    async with page.expect_download() as waiting:
        await chat.button("Export as MD").click()
    assert ANSWER in (await (await waiting.value).path()).read_text()

    page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
    await chat.button("Delete").click()
    await expect(entries).to_have_count(1)
    await page.reload()
    await expect(entries).to_have_text(["Who was Ada?"])


async def test_questions_are_edited_and_answers_made_anew_as_branches(
    chat: ChatPage, stage: Stage
) -> None:
    await chat.ask("What is there?")
    await chat.answered()
    stage.says("Something else.")
    await chat.button("Another answer").click()
    await expect(chat.answers).to_contain_text("Something else.")
    await chat.button("Previous version").click()
    await expect(chat.answers).to_contain_text(ANSWER)

    stage.says("A third thing.")
    await chat.page.locator(".message.user").hover()
    await chat.button("Edit").click()
    field = chat.page.locator(".editing textarea")
    await expect(field).to_have_value("What is there?")
    await field.fill("What is here?")
    await field.press("Enter")
    await expect(chat.answers).to_contain_text("A third thing.")
    await expect(chat.page.locator(".bubble")).to_have_text("What is here?")
    await chat.page.locator(".message.user").hover()
    await chat.page.locator(".message.user").get_by_role("button", name="Previous version").click()
    await expect(chat.page.locator(".bubble")).to_have_text("What is there?")


@pytest.mark.parametrize("how", ["Escape", pytest.param("button", marks=pytest.mark.full)])
async def test_an_answer_is_stopped_here_and_at_the_server(
    chat: ChatPage, stage: Stage, how: str
) -> None:
    gate = Gate(stage, 5)
    await chat.ask("What is there?")
    await expect(chat.answers).to_contain_text("The red")
    if how == "button":
        await chat.page.locator(".dock").get_by_role("button", name="Stop").click()
    else:
        await chat.page.keyboard.press("Escape")
    await expect(chat.answers).to_contain_text("Stopped.")
    async with asyncio.timeout(60):
        while (await stage.http.get("/load")).json()["server_load"]:
            await asyncio.sleep(0.05)
    gate.open()
    await chat.ask("Go on")  # and the next one is answered
    await chat.answered()


async def test_a_reload_in_mid_answer_goes_on(chat: ChatPage, stage: Stage) -> None:
    gate = Gate(stage, 5)
    await chat.ask("What is there?")
    await expect(chat.answers).to_contain_text("The red")
    await chat.page.reload()
    await expect(chat.answers).to_contain_text("The red")
    gate.open()
    await chat.answered()
    await expect(chat.answers.locator(".markdown")).to_have_text(ANSWER)


async def test_a_killed_gateway_is_followed_by_the_next(stage: Stage, browser: Browser) -> None:
    gate = Gate(stage, 5)
    async with (
        beside(stage) as (process, client),
        Balancer([client.base_url.port or 0]) as balancer,
    ):
        chat = await ChatPage.open(browser, balancer.url)
        await chat.ask("What is there?")
        await expect(chat.answers).to_contain_text("The red")
        process.kill()
        await process.wait()
        # For a moment the proxy has nobody to ask and sends its own page.
        await expect(chat.answers).to_contain_text("The connection broke. Going on in a moment…")
        balancer.ports = [stage.gateway.http_server.port]
        gate.open()
        await chat.answered()
        await expect(chat.answers.locator(".markdown")).to_have_text(ANSWER)
        await expect(chat.answers).to_contain_text("the answer went on by itself")
        assert chat.complaints == []
