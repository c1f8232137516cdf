"""The trainer learns, saves, goes on; its passes agree with `transformers`."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo_model import train
from examples.demo_model.calling import call_message, pick_tools, tools_line, with_calls
from examples.demo_model.export import CHECKPOINT, export
from examples.demo_model.model import (
    BOS,
    END,
    IMAGE,
    PATCHES,
    SYSTEM,
    USER,
    build_model,
    normalise,
    read,
    see,
)
from examples.demo_model.pictures.drawing import draw
from examples.demo_model.questions import WEIGHTS, ask
from examples.demo_model.tokenizer import CHAT_TEMPLATE, load_tokenizer
from examples.demo_model.training.data import (
    BETWEEN_DRAWERS,
    REPORTED,
    Background,
    Speaker,
    row_mask,
    talk_batches,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's deprecations


def test_our_pass_is_that_of_transformers() -> None:
    model: Any = build_model(300)
    model.eval()
    pixels = normalise(torch.randint(0, 255, (2, 144, 144, 3), dtype=torch.uint8))
    prefix = torch.tensor([[1, 5] + [IMAGE] * PATCHES] * 2)
    rows = torch.randint(7, 300, (2, 1, 9))
    start = prefix.shape[1]
    positions = torch.arange(start, start + 9).expand(2, 1, 9)
    with torch.no_grad():
        theirs = model(input_ids=torch.cat([prefix, rows[:, 0]], 1), pixel_values=pixels).logits
        mask = row_mask(torch.ones_like(rows)).float()
        hidden = read(model, prefix, see(model, pixels)[0], rows, positions, mask)
        ours = model.lm_head(hidden)[:, 0]
    torch.testing.assert_close(theirs[:, -9:], ours, atol=1e-4, rtol=1e-4)


def test_batches_label_answers_only() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    talk = next(talk_batches(1, 2, 1, tokenizer.backend_tokenizer.to_str(), WEIGHTS))
    told = talk.labels >= 0
    assert torch.equal(told, talk.answer >= 0)
    assert set(talk.kinds) <= set(REPORTED)
    for index in range(len(talk.kinds)):
        said = talk.labels[talk.answer == index]
        assert said[-1] == tokenizer.eos_token_id
        text = str(tokenizer.decode(said[:-1]))
        assert text.endswith((".", "。", "!", "！", "}", "</tool_call>"))
    follows = talk.group[:, :, 1:] == talk.group[:, :, :-1]
    step = talk.positions[:, :, 1:] - talk.positions[:, :, :-1]
    assert bool((step[follows & (talk.group[:, :, 1:] > 0)] == 1).all())


def test_rows_are_what_the_chat_template_writes() -> None:
    tokenizer: Any = load_tokenizer(CHECKPOINT)
    rng, scene = random.Random(2), draw(3)[1]
    asked = [turn for seed in range(40) if (turn := ask(scene, "count", "en", random.Random(seed)))]
    question = next(turn for turn in asked if turn.counted)
    turns = with_calls([question], scene, rng)
    tools = pick_tools(rng, with_count=True)
    speaker = Speaker(tokenizer, WEIGHTS)
    row = speaker.tokens(turns, True, rng)[0]
    asked_as = tokenizer.decode(row).split("<|end|>")[0]
    told = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": asked_as}]},
        call_message(question.counted or ""),
        {"role": "tool", "content": turns[1].question},
        {"role": "assistant", "content": turns[1].answer},
    ]
    text = tokenizer.apply_chat_template(
        told, tools=tools, chat_template=CHAT_TEMPLATE, tokenize=False
    )
    head = [BOS, SYSTEM, *speaker.encode(tools_line(tools)), END, USER, IMAGE]
    assert tokenizer.encode(text) == head + row


def test_batches_with_tools_call_them() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    told = "tools: "
    batches = talk_batches(5, 4, 0, tokenizer.backend_tokenizer.to_str(), WEIGHTS)
    seen = set()
    for talk in itertools.islice(batches, 12):
        offered = told in tokenizer.decode(talk.prefix[0])
        countable = "count(shape)" in tokenizer.decode(talk.prefix[0])
        assert countable or "tool call" not in talk.kinds
        assert talk.kinds.count("tool call") == talk.kinds.count("tool answer")
        seen.add((offered, countable, "tool call" in talk.kinds))
    assert {(True, True, True), (False, False, False)} <= seen


def test_small_talk_is_as_frequent_as_told() -> None:
    tokenizer = load_tokenizer(CHECKPOINT).backend_tokenizer.to_str()
    shares = []
    for small_talk in (0.0, 0.5):
        batches = talk_batches(3, 8, 0, tokenizer, WEIGHTS, small_talk)
        talk = next(batch for batch in batches if batch.pictures is not None)
        shares.append(talk.kinds.count("chat") / len(talk.kinds))
    assert shares[0] == 0 and shares[1] > 0.2


def seeds_from(seed: int, step: int) -> Iterator[int]:
    """What stands in for pictures where only processes are looked at."""
    return itertools.count(seed, step)


@pytest.mark.full
def test_drawers_have_seeds_of_their_own() -> None:
    found: list[list[int]] = [[], []]
    batches = Background(seeds_from, 5, 3, drawers=2)
    try:
        while not all(found):
            number = batches.next()
            found[number >= BETWEEN_DRAWERS].append(number % BETWEEN_DRAWERS)
    finally:
        batches.close()
    for numbers in found:
        assert numbers == [5 + 3 * n for n in range(len(numbers))]


def test_heads_learn_first_where_asked(tmp_path: Path) -> None:
    asked = ["--from", str(CHECKPOINT), "--run", str(tmp_path), "--batch", "2", "--minutes", "0"]
    asked += ["--foreground", "--threads", "1", "--heads-first"]
    before, after = train.main([*asked, "0"]), train.main([*asked, "2"])
    assert after.step == 0
    moved = zip(before.heads.parameters(), after.heads.parameters(), strict=True)
    assert not all(torch.equal(p, q) for p, q in moved)
    kept = zip(before.model.parameters(), after.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in kept)


@pytest.mark.parametrize("stage", ["see", "talk"])
def test_one_step_then_one_more(stage: str, tmp_path: Path) -> None:
    common = [
        "--stage",
        stage,
        "--from",
        str(CHECKPOINT),
        "--run",
        str(tmp_path),
        "--batch",
        "2",
        "--steps",
        "1",
        "--foreground",
        "--threads",
        "1",
    ]
    first = train.main(common)
    assert first.step == 1 and (tmp_path / "state.pt").exists()
    before = {n: p.clone() for n, p in first.model.named_parameters()}
    second = train.main(common)
    assert second.step == 2 and second.seconds > first.seconds
    moved = [n for n, p in second.model.named_parameters() if not torch.equal(p, before[n])]
    assert any("vision_tower" in n for n in moved)


def test_export_is_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    size = export(build_model(len(tokenizer)), tokenizer, tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "processor_config.json",
        "generation_config.json",
    }
    assert size < 16e6
    # The template is this code's, also where the tokenizer is of a folder with an older one.
    assert (tmp_path / "out/chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llava"
