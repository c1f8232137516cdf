"""The outlines of the shapes, as polygons."""

from __future__ import annotations

import math
import random

Point = tuple[float, float]


def corners_of(shape: str, rng: random.Random) -> list[Point]:
    """The polygon of a shape, in the box -1..1 on both axes (stretched to fill it)."""
    points = {
        "square": _square,
        "diamond": _diamond,
        "triangle": _triangle,
        "star": _star,
        "cross": _cross,
    }[shape](rng)
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    mid_x, half_x = (max(xs) + min(xs)) / 2, (max(xs) - min(xs)) / 2
    mid_y, half_y = (max(ys) + min(ys)) / 2, (max(ys) - min(ys)) / 2
    return [((x - mid_x) / half_x, -(y - mid_y) / half_y) for x, y in points]


def _square(rng: random.Random) -> list[Point]:
    return _ring(4, 45 + (rng.uniform(-11, 11) if rng.random() < 0.25 else 0))


def _diamond(rng: random.Random) -> list[Point]:
    return _ring(4, rng.uniform(-6, 6) if rng.random() < 0.15 else 0)


def _triangle(rng: random.Random) -> list[Point]:
    roll = rng.random()
    if roll < 0.5:
        return _ring(3, 90)
    if roll < 0.6:
        return _ring(3, -90)
    if roll < 0.7:  # a right angle in one of the corners
        return _turned([(-1, -1), (-1, 1), (1, -1)], 90 * rng.randrange(4))
    return _ring(3, rng.uniform(0, 360))


def _star(rng: random.Random) -> list[Point]:
    tips = 5 if rng.random() < 0.92 else 6
    inner = rng.uniform(0.36, 0.5) if tips == 5 else rng.uniform(0.45, 0.58)
    turn = 90 + (rng.uniform(0, 72) if rng.random() < 0.3 else 0)
    points = []
    for tip, notch in zip(_ring(tips, turn), _ring(tips, turn + 180 / tips), strict=True):
        points += [tip, (notch[0] * inner, notch[1] * inner)]
    return points


def _cross(rng: random.Random) -> list[Point]:
    a = rng.uniform(0.16, 0.42)
    points = [
        (-a, 1),
        (a, 1),
        (a, a),
        (1, a),
        (1, -a),
        (a, -a),
        (a, -1),
        (-a, -1),
        (-a, -a),
        (-1, -a),
        (-1, a),
        (-a, a),
    ]
    roll = rng.random()
    if roll < 0.12:
        return _turned(points, 45)
    return _turned(points, rng.uniform(-12, 12)) if roll < 0.25 else points


def _ring(count: int, turn: float) -> list[Point]:
    return [
        (
            math.cos(math.radians(turn + 360 * i / count)),
            math.sin(math.radians(turn + 360 * i / count)),
        )
        for i in range(count)
    ]


def _turned(points: list[Point], degrees: float) -> list[Point]:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x * c - y * s, x * s + y * c) for x, y in points]
