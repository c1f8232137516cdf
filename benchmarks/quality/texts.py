"""What distributions are compared on: texts that the measured model never learned."""

import json
import random
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.quality.text_model.export import HELD_OUT
from examples.demo_model import chat
from examples.demo_model.pictures.drawing import draw
from examples.demo_model.questions import WEIGHTS, ask
from examples.demo_model.words import LANGUAGES
from shared.settings import DEMO_MODEL

PIECE = 256  # tokens of a text at most


def texts_for(model: Path, tokens: int) -> tuple[str, list[list[int]]]:
    """What the texts are, and their token ids: `tokens` in all or a little more. Of the demo model, which knows nothing
    else, its own chats; of all others pages of documentation."""
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(model)
    if model.resolve() == DEMO_MODEL.resolve():
        return "chats without pictures", _chats(tokenizer, tokens)
    return "held-out pages of documentation", _pages(tokenizer, tokens)


def _pages(tokenizer: Any, tokens: int) -> list[list[int]]:
    """The first piece of every page, then the second of every longer one, and so on, as long as there are any."""
    pages = json.loads(HELD_OUT.read_text("utf-8")).values()
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [start + tokenizer(page, add_special_tokens=False)["input_ids"] for page in pages]
    longest = max(map(len, ids))
    pieces = [
        page[at : at + PIECE]
        for at in range(0, longest, PIECE)
        for page in ids
        if len(page) >= at + PIECE // 2
    ]
    return _first(pieces, tokens)


def _chats(tokenizer: Any, tokens: int) -> list[list[int]]:
    """Small talk, other subjects, and questions about a picture that was not sent, each with the model's answer."""
    rng = random.Random(3)
    found: list[list[int]] = []
    while sum(map(len, found)) < tokens:
        for language in LANGUAGES:
            _, scene = draw(2 * rng.getrandbits(48) + 1)  # training draws even seeds only
            asked = ask(scene, rng.choice(list(WEIGHTS)), language, rng)
            turns = [chat.small_talk(language, rng), chat.off_topic(language, rng)]
            turns += [chat.no_picture(asked.question, language)] if asked else []
            rng.shuffle(turns)
            messages = [
                {"role": role, "content": content}
                for turn in turns
                for role, content in (
                    ("user", chat.dress(turn.question, language, rng)),
                    ("assistant", turn.answer),
                )
            ]
            found.append(tokenizer.apply_chat_template(messages)["input_ids"][:PIECE])
    return _first(found, tokens)


def _first(pieces: list[list[int]], tokens: int) -> list[list[int]]:
    chosen: list[list[int]] = []
    for piece in pieces:
        if sum(map(len, chosen)) >= tokens:
            break
        chosen.append(piece)
    return chosen
