"""Questions about a scene, in many words, and their answers, in few.

Every kind returns None for a scene in which its question has no single right answer. Answers have
one fixed sentence per kind and language; `judge.py` reads the facts back out of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from examples.demo_model.asking.base import Turn
from examples.demo_model.asking.follow import Questions
from examples.demo_model.asking.relations import LARGER, differs, relation_of
from examples.demo_model.pictures.scenes import Scene

__all__ = ["KINDS", "LARGER", "WEIGHTS", "Questions", "Turn", "ask", "differs", "relation_of"]

KINDS: dict[str, Callable[[Questions], Turn | None]] = {
    "what": Questions.what,
    "describe": Questions.describe,
    "colour": Questions.colour,
    "shape": Questions.shape,
    "count": Questions.count,
    "where": Questions.where,
    "at": Questions.at,
    "relate": Questions.relate,
    "confirm": Questions.confirm,
    "exists": Questions.exists,
    "size": Questions.size,
    "number": Questions.number,
    "colours": Questions.colours,
    "ground": Questions.ground,
    "json": Questions.as_json,
}
# Of the kinds whose answers are short; `training/data.py` says how often JSON is asked for.
WEIGHTS: dict[str, float] = {
    "what": 0.1,
    "describe": 0.1,
    "colour": 0.1,
    "shape": 0.06,
    "count": 0.13,
    "where": 0.1,
    "at": 0.05,
    "relate": 0.1,
    "confirm": 0.12,
    "exists": 0.11,
    "size": 0.1,
    "number": 0.12,
    "colours": 0.02,
    "ground": 0.02,
}


def ask(scene: Scene, kind: str, language: str, rng: random.Random) -> Turn | None:
    """One question of a kind, or None where this scene has none; tries a few times."""
    for _ in range(4):
        turn = KINDS[kind](Questions(scene, language, rng))
        if turn is not None:
            return turn
    return None
