"""Pictures, videos and texts on their way into a question."""

import json
from pathlib import Path

from playwright.async_api import Browser, expect
from tokenizers import Tokenizer

from tests.gateway.page.test_conversations import asked
from tests.support.browser import ChatPage
from tests.support.gateway.stage import ANSWER, open_stage
from tests.support.pictures import png

PICTURE = png(1)


async def test_pictures_come_by_drop_paste_and_button(chat: ChatPage) -> None:
    bodies = asked(chat.page)
    files = chat.page.locator(".file")
    await chat.drop([("a.png", "image/png", PICTURE), ("b.png", "image/png", PICTURE)])
    await expect(files).to_have_count(2)
    await chat.drop([("c.png", "image/png", PICTURE)], paste=True)
    await expect(files).to_have_count(3)
    choose = chat.page.locator("input[type=file]")
    await choose.set_input_files({"name": "d.png", "mimeType": "image/png", "buffer": PICTURE})
    await expect(files).to_have_count(4)
    await expect(files.first).to_contain_text("4 tokens")  # what a picture costs here
    await chat.button("Remove b.png").click()
    await expect(files).to_have_count(3)
    await chat.question.fill("What are these?")
    await expect(chat.page.locator(".count")).to_contain_text("of 512 tokens")
    await chat.question.press("Enter")
    await chat.answered()
    await expect(chat.page.locator(".gallery img")).to_have_count(3)
    [message] = bodies[0]["messages"]
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image_url", "image_url", "image_url", "text"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    # They are sent along with the next question, also after a reload.
    await chat.page.reload()
    await expect(chat.page.locator(".gallery img")).to_have_count(3)
    await expect(
        chat.button("Send")
    ).to_be_visible()  # also where the reload came before it was kept
    await chat.answered()
    await chat.ask("Sure?")
    await chat.answered(2)
    assert bodies[1]["messages"][0] == message


async def test_a_question_waits_for_its_file(chat: ChatPage) -> None:
    bodies = asked(chat.page)
    slow = """() => {
        const read = File.prototype.arrayBuffer;
        File.prototype.arrayBuffer = async function () {
            await new Promise((wake) => setTimeout(wake, 400));
            return read.call(this);
        };
    }"""
    await chat.page.evaluate(slow)
    await chat.question.fill("What is it?")
    await chat.drop([("a.png", "image/png", PICTURE)])
    await chat.question.press("Enter")
    await chat.answered()
    assert len(bodies[0]["messages"][0]["content"]) == 2


async def test_what_cannot_be_sent_is_refused_with_a_sentence(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, browser: Browser
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, max_body_bytes=200_000) as stage:
        chat = await ChatPage.open(browser, stage.gateway.url)
        await expect(chat.page.locator(".model-name").first).to_have_text(stage.gateway.model.name)
        warning = chat.page.get_by_role("alert")
        await chat.drop([("large.png", "image/png", PICTURE + bytes(200_000))])
        await expect(warning).to_have_text(
            "large.png has 200 KB. With what else is sent this server takes 200 KB in all."
        )
        await chat.drop([("d.svg", "image/svg+xml", b"<svg/>")])
        await expect(warning).to_contain_text("SVG drawing")
        await chat.drop([("a.mp4", "video/mp4", b"\0\0\0\x18ftypmp42" + bytes(64))])
        await expect(warning).to_have_text("a.mp4: this model takes no videos.")
        await chat.drop([("a.zip", "application/zip", b"PK\x03\x04")])
        await expect(warning).to_contain_text("a.zip cannot be sent")
        await expect(chat.page.locator(".file")).to_have_count(0)
        # Together they may be too large as well.
        picture = PICTURE + bytes(90_000)
        await chat.drop([(name, "image/png", picture) for name in ("a.png", "b.png")])
        await expect(chat.page.locator(".file")).to_have_count(2)
        await chat.ask("What?")
        await expect(chat.answers).to_contain_text("This conversation with its pictures has 2")
        assert not chat.complaints


async def test_a_text_is_put_into_the_question(chat: ChatPage) -> None:
    await chat.drop([("notes.txt", "text/plain", b"one\ntwo ```\n")])
    await expect(chat.question).to_have_value("notes.txt:\n````\none\ntwo ```\n````\n")


async def test_a_camera_takes_a_picture(chat: ChatPage) -> None:
    await chat.button("Take a picture").click()
    await chat.button("Take it").click()
    await expect(chat.page.locator(".file")).to_contain_text("camera.jpg")


async def test_examples_are_asked_with_a_click(chat: ChatPage) -> None:
    bodies = asked(chat.page)
    await chat.page.locator(".example").first.click()
    await chat.answered()
    assert "image_url" in json.dumps(bodies[0])
    await expect(chat.answers).to_contain_text(ANSWER)
