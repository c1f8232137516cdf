"""The shipped folder: small, loadable by `transformers` as it is, and it really sees."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from PIL import Image, ImageDraw
from transformers import AutoProcessor, LlavaForConditionalGeneration

from examples.demo_model import chat
from examples.demo_model.asking.as_json import SCHEMA
from examples.demo_model.calling import COUNT, call_message, call_text
from examples.demo_model.evaluate import answer, cases
from examples.demo_model.export import CHECKPOINT
from examples.demo_model.judge import right

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's deprecations


@pytest.fixture(scope="module")
def processor() -> Any:
    load: Any = AutoProcessor.from_pretrained
    return load(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(torch.float32)


def load_model(dtype: torch.dtype) -> Any:
    loaded: Any = LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=dtype)
    return loaded.eval()


def say(model: Any, processor: Any, messages: Any, *pictures: Any, tools: Any = None) -> str:
    text = processor.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    inputs = processor(images=list(pictures) or None, text=[text], return_tensors="pt")
    out = model.generate(**inputs)
    said: str = processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def red_circle(mode: str = "RGB", size: tuple[int, int] = (400, 300)) -> Image.Image:
    picture = Image.new("RGB", size, "white")
    box = [size[0] * 0.4, size[1] * 0.35, size[0] * 0.6, size[1] * 0.35 + size[0] * 0.2]
    ImageDraw.Draw(picture).ellipse(box, fill=(255, 0, 0))
    return picture.convert(mode)


def user(text: str, picture: bool = True) -> dict[str, Any]:
    parts: list[dict[str, str]] = [{"type": "image"}] if picture else []
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def test_size() -> None:
    assert sum(p.stat().st_size for p in CHECKPOINT.iterdir()) <= 16_000_000


def test_tokenizer_loses_nothing(processor: Any) -> None:
    for text in ("It's 42, 你好！ ünïcode 🎈\n\ttab", "图里有几个红色的圆形？", "xylophone ЖЖ"):
        assert processor.tokenizer.decode(processor.tokenizer.encode(text)) == text


def test_template(processor: Any) -> None:
    told = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is "},
                {"type": "image"},
                {"type": "text", "text": "HERE?"},
                {"type": "image"},
            ],
        },
        {"role": "assistant", "content": "The picture shows a star on the left."},
        {"role": "user", "content": "And?"},
    ]
    assert processor.apply_chat_template(told, add_generation_prompt=True) == (
        "<s><|system|>be brief.<|end|><|user|><image><image>what is here?<|end|>"
        "<|assistant|>The picture shows a star on the left.<|end|><|user|>and?<|end|><|assistant|>"
    )


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
@pytest.mark.parametrize("size", [(64, 64), (400, 300), (1500, 1000)])
def test_sees_any_format_and_size(
    model: Any, processor: Any, mode: str, size: tuple[int, int]
) -> None:
    said = say(model, processor, [user("What is in this picture?")], red_circle(mode, size))
    assert said == "The picture shows a red circle in the centre."


def test_speaks_both_languages_and_of_itself(model: Any, processor: Any) -> None:
    assert say(model, processor, [user("圆形是什么颜色？")], red_circle()) == "圆形是红色的。"
    assert "Tessera" in say(model, processor, [user("Who are you?", picture=False)])
    assert "Tessera" in say(model, processor, [user("你是谁？", picture=False)])


@pytest.mark.parametrize("pictured", [False, True])
@pytest.mark.parametrize("text", ["Hi", "hi", "Hello", "hello", "Hi!", "hi there", "你好", "嗨"])
def test_greets_in_the_language_of_the_greeting(
    model: Any, processor: Any, text: str, pictured: bool
) -> None:
    pictures = [red_circle()] if pictured else []
    said = say(model, processor, [user(text, pictured)], *pictures)
    assert said == chat.ANSWERS["hello"][0 if text.isascii() else 1]


def test_follows_up(model: Any, processor: Any) -> None:
    talk = [
        user("Is there a circle?"),
        {"role": "assistant", "content": "Yes, there is a circle."},
        {"role": "user", "content": "And its colour?"},
    ]
    assert say(model, processor, talk, red_circle()) == "The circle is red."


def test_jpeg_and_grey(model: Any, processor: Any) -> None:
    buffer = io.BytesIO()
    red_circle().save(buffer, "JPEG", quality=60)
    said = say(model, processor, [user("what colour is the circle")], Image.open(buffer))
    assert said == "The circle is red."
    grey = Image.new("L", (200, 200), 255)
    ImageDraw.Draw(grey).rectangle([70, 70, 130, 130], fill=0)
    assert say(model, processor, [user("Which shape is black?")], grey) == (
        "The black shape is a square."
    )


@pytest.mark.parametrize("question", ["Describe the picture as JSON.", "用JSON描述这张图片"])
def test_describes_as_json(model: Any, processor: Any, question: str) -> None:
    told = json.loads(say(model, processor, [user(question)], red_circle()))
    Draft202012Validator(SCHEMA).validate(told)
    circle = {"colour": "red", "shape": "circle", "place": "centre"}
    assert told == {"shapes": [circle], "number": None}


def test_calls_the_tool_that_counts_where_there_is_one(model: Any, processor: Any) -> None:
    question = user("How many circles are there?")
    assert say(model, processor, [question], red_circle()) == "There is 1 circle."
    assert say(model, processor, [question], red_circle(), tools=[COUNT]) == call_text("circle")
    told = [question, call_message("circle"), {"role": "tool", "content": "23"}]
    said = say(model, processor, told, red_circle(), tools=[COUNT])
    assert said == "There are 23 circles."
    seen = say(model, processor, [user("What is in this picture?")], red_circle(), tools=[COUNT])
    assert seen == "The picture shows a red circle in the centre."


@pytest.mark.parametrize("source", ["ours", "other"])
def test_most_fresh_questions_are_right(model: Any, processor: Any, source: str) -> None:
    # JSON is asked for above: the others would wait for its length.
    asked = [c for c in cases(source, per_kind=1, seed=77) if c.picture and c.kind != "json"]
    said = answer(model, processor, asked)
    hits = sum(right(s, c.turns[-1].answer) for s, c in zip(said, asked, strict=True))
    assert hits >= 0.8 * len(asked)


@pytest.mark.full
def test_bfloat16_says_the_same(model: Any, processor: Any) -> None:
    half = load_model(torch.bfloat16)
    asked = [c for c in cases("ours", per_kind=1, seed=5) if c.picture]
    ours, theirs = answer(model, processor, asked), answer(half, processor, asked)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    assert same >= len(asked) - 2
