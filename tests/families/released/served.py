"""What all released forms have in common: served, they are prompted, answered and stopped as the released code does."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.families.check import require_servable
from tests.reference_models.common import Generated, Turn
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.processes.answers import ask_all, assert_ends
from tests.support.processes.services_in_process import services_in_process

TOKENS = 6


@dataclass(frozen=True)
class Released:
    """`folder`: named "under-test". `prompt_ids`, `generate`: of the reference, without pictures. `ends`: ids at which
    the released code stops. `words`: ids of which drawn replies are made. `shown`: what it makes of a reply's text."""

    folder: Path
    prompt_ids: Callable[[Sequence[Turn]], list[int]]
    generate: Callable[[list[int], int], Generated]
    ends: Sequence[int]
    words: Sequence[int]
    shown: Callable[[str], str] = str


def assert_served(model: Released, chats: Sequence[Sequence[Turn]], redis_url: str) -> None:
    """The checkpoint is taken; prompts, greedy answers, ends and texts are those of the reference."""
    require_servable(model.folder)
    asked = [[{"role": role, "content": text} for role, text in turns] for turns in chats]
    with services_in_process(model.folder, redis_url) as system:
        answers = ask_all(system.base_url, asked, TOKENS)
        assert_ends(system.base_url, model.ends)
        texts = [
            _texts(
                system.base_url,
                {"messages": asked[0], "allowed_token_ids": model.words, "seed": seed},
            )
            for seed in range(8)
        ]
    for turns, (prompt, tokens) in zip(chats, answers, strict=True):
        ids = model.prompt_ids(turns)
        assert prompt == ids, turns
        made = model.generate(ids, TOKENS)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)
    for raw, whole, streamed in texts:
        assert whole == streamed == model.shown(raw)
    if model.shown is not str:
        assert any(model.shown(raw) != raw for raw, *_ in texts)


def _texts(url: str, request: Mapping[str, Any]) -> tuple[str, str, str]:
    """Of one drawn answer: the text as the model wrote it, as a chat shows it, and as a stream shows it."""
    common = {"model": "under-test", "max_tokens": 12, "ignore_eos": True, "temperature": 2}
    with httpx.Client(base_url=url, timeout=60) as client:

        def ask(**more: Any) -> httpx.Response:
            sent = {**common, **request, **more}
            return client.post("/chat/completions", json=sent).raise_for_status()

        raw, whole = (
            ask(skip_special_tokens=skip).json()["choices"][0]["message"]["content"]
            for skip in (False, True)
        )
        lines = ask(stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [
        event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]
    ]
    return raw, whole, "".join(pieces)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes one JSON object, and takes the place of what was there."""
    path.write_text(json.dumps(content, ensure_ascii=False))
