"""The question that a new user asks first, about the picture of shapes in README.md."""

from typing import Any

import openai

from services.launcher.console.banner import EXAMPLE_PICTURE
from tests.support.pictures import data_url

SHAPES = ("red circle", "green triangle", "blue square")


def ask(base_url: str, model: str = "tessera-demo", within_s: float = 120) -> str:
    """What the demo model says about the picture, which has each of SHAPES."""
    picture = {"type": "image_url", "image_url": {"url": data_url(EXAMPLE_PICTURE.read_bytes())}}
    question = {"type": "text", "text": "What is in the picture?"}
    return _answer(base_url, [picture, question], model, within_s)


def ask_in_words(base_url: str, question: str, model: str = "tessera-demo") -> str:
    """What the demo model says without a picture."""
    return _answer(base_url, question, model, within_s=120)


def unseen(answer: str) -> list[str]:
    """The shapes that an answer does not name."""
    return [shape for shape in SHAPES if shape not in answer]


def _answer(base_url: str, content: Any, model: str, within_s: float) -> str:
    with openai.OpenAI(base_url=base_url, api_key="none", timeout=within_s) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=40,
        )
    return answer.choices[0].message.content or ""
