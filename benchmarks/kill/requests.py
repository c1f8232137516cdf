"""The requests of a run: half with pictures, several users, some with sampled choices, with a form of the answer, with
calls of a tool. Equal seeds make equal ones.
"""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.kill.settings import KillSettings
from benchmarks.load.pictures import PictureMaker
from benchmarks.load.words import WordPrompts

PATH = "/v1/chat/completions"
# What an answer in JSON is a long list of.
_COLOURS = {"enum": ["red", "green", "blue", "yellow"]}


@dataclass(frozen=True, slots=True)
class Request:
    """A body for PATH, and when it is sent: as a share of the time over which its round is spread."""

    body: dict[str, Any]
    choices: int
    at: float


def draw_requests(settings: KillSettings, model: str, *, calls: bool = False) -> list[Request]:
    """All requests of a run. `calls`: whether the model's tools can be called."""
    words = WordPrompts(None)
    pictures = PictureMaker(*settings.image_width_height, "jpeg")
    requests = []
    for number in range(settings.num_requests):
        draw = random.Random(f"{settings.seed}/request/{number}")
        content: list[dict[str, Any]] = []
        if draw.random() < settings.images:
            content.append({"type": "image_url", "image_url": {"url": pictures.draw(draw)}})
        content.append({"type": "text", "text": words.draw(draw, settings.input_len)})
        choices = 2 if draw.random() < settings.sampled else 1
        most = settings.output_len
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": draw.randint((most + 1) // 2, most),
            "ignore_eos": True,
            "user": f"kill-{number % settings.tenants}",
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if choices == 2:
            body |= {"n": 2, "temperature": 0.8, "top_p": 0.95, "seed": draw.getrandbits(32)}
        at, kind = draw.random(), draw.random()
        if kind < settings.formed:
            body |= _formed(most)
        elif calls and kind < settings.formed + settings.calling:
            body |= calling(most)
        requests.append(Request(body, choices, at))
    return requests


def calling(most: int) -> dict[str, Any]:
    """What makes a request call a tool, with a text of at least so many tokens."""
    function = {"name": "paint", "parameters": _long_list(most), "strict": True}
    return {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "ignore_eos": False,
    }


def _formed(most: int) -> dict[str, Any]:
    """The same for an answer in JSON."""
    form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": _long_list(most)}}
    return {"response_format": form, "ignore_eos": False}


def _long_list(least: int) -> dict[str, Any]:
    """A schema that an answer cut off by `max_tokens` has not come to the end of."""
    colours = {"type": "array", "items": _COLOURS, "minItems": least}
    return {"type": "object", "properties": {"colours": colours}, "required": ["colours"]}


def shares(requests: list[Request], rounds: int) -> list[list[Request]]:
    """The requests in so many parts of equal size, give or take one."""
    bounds = [len(requests) * number // rounds for number in range(rounds + 1)]
    return [requests[a:b] for a, b in pairwise(bounds)]
