"""The question that a new user asks first, about the picture of shapes in README.md."""

from typing import Any

import openai

from services.launcher.banner import EXAMPLE_PICTURE
from tests.support.pictures import data_url

SHAPES = ("red circle", "green triangle", "blue square")


def ask(base_url: str, model: str = "tessera-demo", within_s: float = 120) -> str:
    """What the demo model says about the picture, which has each of SHAPES."""
    picture = {"type": "image_url", "image_url": {"url": data_url(EXAMPLE_PICTURE.read_bytes())}}
    content: Any = [picture, {"type": "text", "text": "What is in the picture?"}]
    with openai.OpenAI(base_url=base_url, api_key="none", timeout=within_s) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=40,
        )
    return answer.choices[0].message.content or ""


def unseen(answer: str) -> list[str]:
    """The shapes that an answer does not name."""
    return [shape for shape in SHAPES if shape not in answer]
