"""Videos on their way into a question, where a model takes them."""

import base64
import json
import re
from pathlib import Path

from playwright.async_api import Locator, expect
from tokenizers import Tokenizer

from shared.errors import InvalidRequest
from tests.gateway.page.test_conversations import asked
from tests.support.browser import ChatPage
from tests.support.gateway.stage import ANSWER, Stage, StagedModel, write_model
from tests.support.tokenizers import byte_level_tokenizer

# No video that a browser plays.
MP4 = b"\0\0\0\x18ftypmp42" + bytes(64)


def _write(folder: Path, tokenizer: Tokenizer) -> Path:
    """A checkpoint folder of a model that takes pictures and videos."""
    path = write_model(folder, tokenizer) / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["Qwen2VLForConditionalGeneration"]
    path.write_text(json.dumps(config))
    return folder


STAGED_MODEL = StagedModel(byte_level_tokenizer, _write, ANSWER)


async def test_a_video_is_shown_counted_sent_and_kept(chat: ChatPage) -> None:
    bodies = asked(chat.page)
    film = await chat.film()
    await expect(chat.question).to_have_attribute("placeholder", re.compile("pictures or videos"))
    await chat.drop([("a.webm", "video/webm", film)])
    choose = chat.page.locator("input[type=file]")
    await choose.set_input_files({"name": "b.webm", "mimeType": "video/webm", "buffer": film})
    files = chat.page.locator(".file")
    await expect(files).to_have_count(2)
    for file in await files.all():
        await expect(file).to_contain_text(f"{len(film) / 1000:.1f} KB · 4 tokens")
        await plays(file.locator("video"))
    await chat.question.fill("What happens?")
    await expect(chat.page.locator(".count")).to_contain_text("of 512 tokens")
    await chat.question.press("Enter")
    await chat.answered()
    [message] = bodies[0]["messages"]
    assert [part["type"] for part in message["content"]] == ["video_url", "video_url", "text"]
    url = "data:video/webm;base64," + base64.b64encode(film).decode()
    assert message["content"][0]["video_url"]["url"] == url

    # They are kept with the conversation, played there, and sent along with the next question.
    await chat.page.reload()
    sent = chat.page.locator(".gallery video")
    await expect(sent).to_have_count(2)
    await plays(sent.first)
    await chat.button("Open a.webm").click()
    large = chat.page.get_by_role("dialog", name="a.webm").locator("video")
    await expect(large).to_have_attribute("controls", "")
    await large.evaluate("(video) => video.play()")
    await expect(large).to_have_js_property("ended", True)
    await chat.page.keyboard.press("Escape")
    await chat.answered()
    await chat.ask("Sure?")
    await chat.answered(2)
    assert bodies[1]["messages"][0] == message


async def plays(video: Locator) -> None:
    """Waits until the browser shows it."""
    await expect(video).to_have_js_property("videoWidth", 96)


async def test_a_video_that_the_browser_cannot_play_is_named_and_sent(chat: ChatPage) -> None:
    bodies = asked(chat.page)
    await chat.drop([("a.mp4", "video/mp4", MP4)])
    await expect(chat.page.locator(".file")).to_contain_text("4 tokens")
    await chat.ask("What happens?")
    await chat.answered()
    await expect(chat.page.locator(".gallery")).to_have_text("a.mp4")
    assert '"data:video/mp4;base64,' in json.dumps(bodies[0])


async def test_what_the_server_cannot_read_is_refused_before_it_is_sent(
    chat: ChatPage, stage: Stage
) -> None:
    why = "this server reads no MP4: send an animated GIF, WebP or PNG"
    field = "messages[0].content[0].video_url"
    stage.preprocess.failure = InvalidRequest("VIDEO_FORMAT", f"{field}: {why}", field=field)
    await chat.question.fill("What happens?")
    await chat.drop([("a.mp4", "video/mp4", MP4)])
    await expect(chat.page.get_by_role("alert")).to_have_text(f"a.mp4: {why}")
    await expect(chat.page.locator(".file")).to_have_count(0)
    await expect(chat.question).to_have_value("What happens?")
