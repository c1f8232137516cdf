"""Scenes are the same for the same seed, and what is said of them is true."""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import numpy as np
import pytest

from examples.demo_model import chat
from examples.demo_model.asking.as_json import SCHEMA
from examples.demo_model.calling import call_text, with_calls
from examples.demo_model.judge import facts, right
from examples.demo_model.pictures import palette
from examples.demo_model.pictures.drawing import draw, draw_with_ink
from examples.demo_model.pictures.other_renderer import draw_other
from examples.demo_model.pictures.palette import COLOURS
from examples.demo_model.pictures.scenes import clear_of_lines
from examples.demo_model.questions import KINDS, LARGER, ask, differs, relation_of
from examples.demo_model.words import COLOUR_WORDS, LANGUAGES, SHAPE_WORDS

SEEDS = range(1, 80, 2)


@pytest.mark.parametrize("make", [draw, draw_other])
def test_same_seed_same_picture(make):  # type: ignore[no-untyped-def]
    for seed in (1, 3, 5):
        first, facts_first = make(seed)
        second, facts_second = make(seed)
        assert np.array_equal(np.asarray(first), np.asarray(second))
        assert facts_first == facts_second


def test_scenes_leave_no_doubt() -> None:
    for seed in SEEDS:
        picture, scene, ink = draw_with_ink(seed)
        assert picture.mode == "RGB" and picture.size == (scene.width, scene.height)
        assert max(picture.size) / min(picture.size) < 3.2 and min(picture.size) >= 64
        for thing in scene.things:
            assert clear_of_lines(thing.x) and clear_of_lines(thing.y)
            assert palette.tells_apart(thing.rgb, scene.ground)
            assert thing.x - thing.w / 2 >= 0 and thing.x + thing.w / 2 <= 1
            assert thing.y - thing.h / 2 >= 0 and thing.y + thing.h / 2 <= 1
        assert bool(scene.things) == bool(np.asarray(ink).max() > 0)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_answers_name_only_what_is_there(kind: str, language: str) -> None:
    rng = random.Random(3)
    asked = 0
    for seed in SEEDS:
        _, scene = draw(seed)
        turn = ask(scene, kind, language, rng)
        if turn is None:
            continue
        asked += 1
        assert right(turn.answer, turn.answer)
        if kind not in ("what", "describe", "at"):
            continue
        here = {t.shape for t in scene.things} | {t.colour for t in scene.things}
        named = {slot for clause in facts(turn.answer) for slot in clause}
        assert named & (set(SHAPE_WORDS["en"]) | set(COLOUR_WORDS["en"])) <= here
    assert asked > 3


def test_json_says_what_is_there() -> None:
    rng = random.Random(4)
    for seed in SEEDS:
        _, scene = draw(seed)
        for language in LANGUAGES:
            turn = ask(scene, "json", language, rng)
            assert turn is not None and "json" in turn.question
            said = json.loads(turn.answer)
            jsonschema.validate(said, SCHEMA)
            listed = [tuple(shape.values()) for shape in said["shapes"]]
            assert listed == [(t.colour, t.shape, t.cell) for t in scene.shapes]
            number = scene.number
            assert said["number"] == (int(number.value) if number else None)


def test_only_the_number_of_one_shape_is_a_call() -> None:
    rng = random.Random(6)
    called = 0
    for seed in SEEDS:
        _, scene = draw(seed)
        for kind in ("count", "exists", "colour", "number"):
            turn = ask(scene, kind, "en", rng)
            if turn is None:
                continue
            turns = with_calls([turn], scene, rng)
            if kind != "count" or "shape" in turn.answer or any(c in turn.answer for c in COLOURS):
                assert turns == [turn]
                continue
            called += 1
            asked, told = turns
            wanted = json.loads(asked.answer.split("\n")[1])["arguments"]["shape"]
            assert wanted in turn.answer and wanted in told.answer
            number = "".join(c for c in told.question if c.isdigit())
            assert f" {number} " in told.answer or (number == "0" and " no " in told.answer)
    assert called > 5


def test_counts_and_numbers_agree_with_the_scene() -> None:
    rng = random.Random(5)
    for seed in SEEDS:
        _, scene = draw(seed)
        turn = ask(scene, "number", "en", rng)
        if turn is not None and scene.number is not None:
            assert turn.answer == f"The number is {scene.number.value}."
        for _ in range(3):
            turn = ask(scene, "count", "en", rng)
            if turn is not None and "shapes" in turn.question and turn.answer[10:11].isdigit():
                assert int(turn.answer[10]) <= len(scene.shapes)


def test_relations_and_sizes_are_clear_and_opposite() -> None:
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    for seed in SEEDS:
        shapes = draw(seed)[1].shapes
        for a, b in itertools.pairwise(shapes):
            there, back = relation_of(a, b), relation_of(b, a)
            assert (there is None) == (back is None)
            if there and back:
                assert [opposite[w] for w in there.split()] == back.split()
            if differs(a, b):
                assert max(a.size, b.size) / min(a.size, b.size) >= LARGER


def test_the_judge_wants_all_facts_and_no_others() -> None:
    truth = "There is a red circle and a blue square."
    assert right("There is a blue square and a red circle.", truth)
    assert not right("There is a blue circle and a red square.", truth)
    assert not right("There is a red circle.", truth)
    assert not right("There is a red circle, a blue square and a black star.", truth)
    assert right("I see two stars.", "There are 2 stars.")
    assert not right("The number is 24.", "The number is 42.")
    assert not right("No, the circle is red.", "Yes, the circle is red.")
    assert right(
        "图中有一个蓝色的正方形和一个红色的圆形。", "图中有一个红色的圆形和一个蓝色的正方形。"
    )
    assert not right("图中有一个红色的圆形。", "There is a red circle.")
    assert not right("The star is in the top left.", "The star is on the left.")


def test_the_judge_reads_json_and_calls() -> None:
    circle = '{"colour": "red", "shape": "circle", "place": "left"}'
    square = '{"colour": "red", "shape": "square", "place": "left"}'
    truth = f'{{"shapes": [{circle}, {square}], "number": 42}}'
    assert right(f'{{"number": 42, "shapes": [{square},{circle}]}}', truth)
    assert not right(f'{{"shapes": [{circle}, {square}], "number": null}}', truth)
    assert not right(f'{{"shapes": [{circle}], "number": 42}}', truth)
    assert not right(f'{{"shapes": [{circle}, {circle}], "number": 42}}', truth)
    assert not right(truth[:-1], truth)
    assert right(call_text("star"), call_text("star"))
    assert not right(call_text("star"), call_text("cross"))
    assert not right("There are 2 stars.", call_text("star"))
    assert not right(call_text("star").strip("<"), call_text("star"))


def test_small_talk_keeps_its_language() -> None:
    rng = random.Random(1)
    for language in LANGUAGES:
        for _ in range(200):
            for make in (chat.small_talk, chat.off_topic):
                turn = make(language, rng)
                assert "{" not in turn.question and "[" not in turn.question
                assert any(c >= "\u4e00" for c in turn.answer) == (language == "zh")
                # Words of one language alone are never answered in the other.
                chinese = any(c >= "\u4e00" for c in turn.question)
                english = any("a" <= c <= "z" for c in turn.question)
                assert chinese or not english if language == "zh" else not chinese
