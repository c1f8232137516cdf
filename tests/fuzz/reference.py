"""What everybody else sees meanwhile: the same questions, which must have the same answers throughout."""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

from tests.fuzz.verdict import Broken
from tests.support.pictures import data_url, png

_WITHIN_S = 60.0


class Reference:
    """Asks about words and about a picture, and compares with the first answers."""

    def __init__(self, base_url: str, model: str) -> None:
        self._url = f"{base_url}/chat/completions"
        picture = {"type": "image_url", "image_url": {"url": data_url(png(7, (56, 56)))}}
        text = {"type": "text", "text": "What is in the picture?"}
        few = {"model": model, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        contents: list[Any] = ["Where does it end?", [picture, text]]
        self._bodies = [{**few, "messages": [{"role": "user", "content": c}]} for c in contents]
        self._answers: list[str] = []

    async def check(self) -> None:
        """Raises Broken if an answer is missing or another than at first."""
        answers = [await asyncio.to_thread(self._ask, body) for body in self._bodies]
        self._answers = self._answers or answers
        if answers != self._answers:
            raise Broken(f"a right request is answered otherwise: {answers}, first {self._answers}")

    def _ask(self, body: dict[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            raise Broken(f"a right request fails: {error.read().decode()}") from error
        except OSError as error:
            raise Broken(f"a right request fails: {error}") from error
