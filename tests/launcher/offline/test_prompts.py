"""Prompts, conversations and media as bodies of requests."""

import base64
import io
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from services.launcher.offline.prompts.prompts import read_conversation, read_prompt

PICTURE = PIL.Image.new("RGB", (3, 2), (200, 30, 40))


def shown(url: str) -> PIL.Image.Image:
    data = base64.b64decode(url.partition("base64,")[2])
    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


def test_texts_ids_and_dicts_are_prompts() -> None:
    assert read_prompt("a").body == {"prompt": "a"}
    assert read_prompt([3, 4]).body == read_prompt({"prompt_token_ids": [3, 4]}).body
    assert read_prompt({"prompt": "a", "multi_modal_data": None}).body == {"prompt": "a"}


def test_a_picture_may_be_a_path_bytes_a_url_or_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.png"
    PICTURE.save(file)
    monkeypatch.chdir(tmp_path)
    url = "https://example.org/a.png"
    given = ["a.png", file, file.read_bytes(), PICTURE, PICTURE.convert("CMYK"), url]
    body = read_prompt({"prompt": "x", "multi_modal_data": {"image": given}}).body
    relative, path, data, memory, converted, passed = body["multi_modal_data"]["image"]
    assert relative == path == str(file) and passed == url
    assert all(shown(one).tobytes() == PICTURE.tobytes() for one in (data, memory))
    assert shown(converted).size == PICTURE.size
    one = read_prompt({"prompt": "x", "multi_modal_data": {"image": PICTURE}}).body
    assert one["multi_modal_data"]["image"] == [memory]


def test_frames_in_memory_are_a_video() -> None:
    body = read_prompt({"prompt": "x", "multi_modal_data": {"video": [[PICTURE, PICTURE]]}}).body
    (url,) = body["multi_modal_data"]["video"]
    frames = url.removeprefix("data:video/png;base64,").split(",")
    assert len(frames) == 2 and shown(f"base64,{frames[1]}").size == PICTURE.size


def test_parts_of_messages_may_be_those_of_the_articles(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    PICTURE.save(file)
    parts = [{"image": file}, {"text": "?"}, {"type": "image_pil", "image_pil": PICTURE}, "more"]
    plain = {"role": "assistant", "content": "yes"}
    body = read_conversation([{"role": "user", "content": parts}, plain], tools=None).body
    assert "tools" not in body and body["messages"][1] == plain
    path, text, memory, more = body["messages"][0]["content"]
    assert path == {"image": str(file)} and text == {"text": "?"}
    assert memory["type"] == "image" and shown(memory["image"]).size == PICTURE.size
    assert more == {"type": "text", "text": "more"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "must be a text, a list of token ids or a dict"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either prompt or prompt_token_ids"),
        ({"multi_modal_data": {}}, "either prompt or prompt_token_ids"),
        ({"prompt": "a", "images": []}, "has no 'images'"),
        ({"prompt": "a", "multi_modal_data": {"audio": "x"}}, "multi_modal_data.audio"),
        ({"prompt": "a", "multi_modal_data": {"image": "/no/such.png"}}, "no file /no/such.png"),
        ({"prompt": "a", "multi_modal_data": {"image": 3}}, "a path, a URL, the bytes"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": b"x"}}, "prompt that is a text"),
        ({"prompt_token_ids": []}, "at least one token id"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        read_prompt(prompt)
