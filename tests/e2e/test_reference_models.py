"""Models whose chat format and class transformers does not have, through the whole system: prompt ids and tokens are
those of the reference implementations."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.reference_models import qwen_vl, tiktoken_words
from tests.reference_models.common import IMAGE, Turn
from tests.reference_models.text_models import chatglm_6b
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import data_url, png
from tests.support.processes.answers import ask_all, assert_ends
from tests.support.processes.services_in_process import services_in_process

SIZES = [(50, 70), (64, 64), (200, 30)]
TOKENS = 8
QUESTIONS: list[list[Turn]] = [
    [("user", "What?")],
    [("user", "The red circle\nstands   left."), ("assistant", "Dogs."), ("user", "And this?")],
    [("user", "图中有什么？")],
]
PICTURES: list[list[Turn]] = [
    [("user", f"{IMAGE}and {IMAGE}What?"), ("assistant", "Dogs."), ("user", f"{IMAGE}And this?")],
    [("user", f"What is {IMAGE}in the picture?")],
]
Generate = Callable[[list[int], Sequence[Image.Image]], Any]


def picture(number: int) -> bytes:
    return png(number, SIZES[number])


def messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """As OpenAI's API has them; pictures are numbered through a conversation."""
    numbers = iter(range(len(SIZES)))
    found = []
    for role, text in turns:
        parts: list[dict[str, Any]] = []
        for index, words in enumerate(text.split(IMAGE)):
            if index:
                url = data_url(picture(next(numbers)))
                parts.append({"type": "image_url", "image_url": {"url": url}})
            if words:
                parts.append({"type": "text", "text": words})
        found.append({"role": role, "content": parts})
    return found


def assert_answers(
    folder: Path,
    redis_url: str,
    chats: Sequence[Sequence[Turn]],
    prompt_ids: Callable[[Sequence[Turn], list[tuple[int, int]]], list[int]],
    generate: Generate,
    ends: Sequence[int] = (),
) -> None:
    """Of all chats at once, and once more with their prompts in the cache; each of `ends` ends an answer."""
    with services_in_process(folder, redis_url) as system:
        asked = [messages(chat) for chat in chats]
        answers = ask_all(system.base_url, asked, TOKENS)
        again = ask_all(system.base_url, asked, TOKENS)
        assert_ends(system.base_url, ends)
    assert again == answers
    for chat, (prompt, tokens) in zip(chats, answers, strict=True):
        count = sum(text.count(IMAGE) for _, text in chat)
        shown = [Image.open(io.BytesIO(picture(number))).convert("RGB") for number in range(count)]
        ids = prompt_ids(chat, [image.size for image in shown])
        assert prompt == ids
        expected = generate(ids, shown)
        assert_same_up_to_ties(tokens, expected.tokens, expected.logits)


@pytest.mark.timeout(300)
def test_qwen_vl(tmp_path: Path, redis_url: str) -> None:
    folder = qwen_vl.write_checkpoint(tmp_path / "under-test")
    model = qwen_vl.QwenVL(folder)
    places = (tiktoken_words.END_OF_TEXT, tiktoken_words.START, tiktoken_words.END)
    assert_answers(
        folder,
        redis_url,
        [*QUESTIONS, *PICTURES],
        model.prompt_ids,
        lambda ids, images: model.generate(ids, images, TOKENS),
        [model.words.special(place) for place in places],
    )


@pytest.mark.timeout(300)
def test_chatglm_6b(tmp_path: Path, redis_url: str) -> None:
    """Single lines: in the reference's folder no tokenizer file says what becomes of line ends."""
    folder = chatglm_6b.write_checkpoint(tmp_path / "under-test")
    model = chatglm_6b.ChatGlm6B(folder)
    assert_answers(
        folder,
        redis_url,
        [*QUESTIONS[::2], [("user", "The red circle stands left.")]],
        lambda turns, sizes: model.prompt_ids(turns),
        lambda ids, images: model.generate(ids, TOKENS),
    )
