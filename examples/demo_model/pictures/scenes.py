"""Scenes: what lies where in a picture. Drawing them is `drawing.py`'s work.

A scene is chosen at random, but so that every fact about it is unambiguous: no centre near the border
between two ninths of the picture, no colour between two names, no thing on a ground of its colour.
All lengths are fractions: x and w of the picture's width, y and h of its height.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from examples.demo_model.pictures import palette
from examples.demo_model.pictures.palette import COLOURS, RGB

SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
CELLS = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
CELL_MARGIN = 0.035  # how far a centre keeps from the lines between the ninths


@dataclass(slots=True)
class Thing:
    """One shape or the printed number."""

    shape: str  # one of SHAPES, or "number"
    colour: str
    x: float
    y: float
    w: float  # its bounding box, for a number that of the ink
    h: float
    value: str = ""  # the digits of a number
    rgb: RGB = (0, 0, 0)
    style: dict[str, float] = field(default_factory=dict)  # how it is drawn: no fact

    @property
    def size(self) -> float:
        """The side of the square of the same bounding area."""
        return math.sqrt(self.w * self.h)

    @property
    def cell(self) -> str:
        """The ninth of the picture that holds its centre."""
        return CELLS[3 * min(2, int(self.y * 3)) + min(2, int(self.x * 3))]

    @property
    def is_number(self) -> bool:
        return self.shape == "number"


@dataclass(slots=True)
class Scene:
    """Everything that is true of one picture."""

    width: int  # pixels
    height: int
    ground: RGB
    ground_name: str | None  # None where people would not agree on a name
    things: list[Thing]

    @property
    def shapes(self) -> list[Thing]:
        """The shapes from left to right."""
        return sorted((t for t in self.things if not t.is_number), key=lambda t: t.x)

    @property
    def number(self) -> Thing | None:
        return next((t for t in self.things if t.is_number), None)


def clear_of_lines(v: float) -> bool:
    """Whether a coordinate keeps clear of both lines between the thirds."""
    return abs(v - 1 / 3) >= CELL_MARGIN and abs(v - 2 / 3) >= CELL_MARGIN


def pick_canvas(rng: random.Random, largest: int = 420) -> tuple[int, int]:
    """Width and height in pixels: any shape up to 3:1, near the model's own resolution mostly."""
    ratio = 1.0 if rng.random() < 0.4 else math.exp(rng.triangular(-1.1, 1.1, 0.0))
    side = math.exp(rng.uniform(math.log(112), math.log(largest)))
    width = round(side * math.sqrt(ratio))
    height = round(side / math.sqrt(ratio))
    return max(64, width), max(64, height)


def pick_value(rng: random.Random) -> str:
    """One to three digits, longer ones oftener since they are harder."""
    digits = rng.choices((1, 2, 3), (0.25, 0.33, 0.42))[0]
    if digits == 1:
        return str(rng.randrange(10))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def pick_scene(rng: random.Random, largest: int = 420, easy: bool = False) -> Scene:
    """A random scene; an easy one has few and large things, for the beginning of the training."""
    while True:
        scene = _try_scene(rng, largest, easy)
        if scene is not None:
            return scene


def _try_scene(rng: random.Random, largest: int, easy: bool) -> Scene | None:
    width, height = pick_canvas(rng, largest)
    ground, ground_name = palette.pick_ground(rng)
    roll = rng.random()
    if roll < 0.015:
        return Scene(width, height, ground, ground_name, [])
    with_number = roll < 0.38
    if easy:
        shapes = 0 if with_number else rng.randint(1, 2)
    elif with_number:
        shapes = rng.choices((0, 1, 2, 3), (0.45, 0.25, 0.18, 0.12))[0]
    else:
        shapes = rng.choices((1, 2, 3, 4), (0.17, 0.28, 0.29, 0.26))[0]
    things: list[Thing] = []
    if with_number:
        number = _pick_number(rng, width, height, ground, shapes, 0.35 if easy else 0.115)
        if number is None:
            return None
        things.append(number)
    # A narrow choice of names now and then, so that counts above one are common.
    few_shapes = rng.random() < 0.3
    few_colours = rng.random() < 0.25
    shape_names = rng.sample(SHAPES, 2) if few_shapes else list(SHAPES)
    colour_names = rng.sample(COLOURS, 3) if few_colours else list(COLOURS)
    for _ in range(shapes):
        thing = _place_shape(
            rng,
            shape_names,
            colour_names,
            width,
            height,
            ground,
            things,
            shapes,
            0.3 if easy else 0.13,
        )
        if thing is None:
            return None
        things.append(thing)
    return Scene(width, height, ground, ground_name, things)


def _pick_rgb(rng: random.Random, names: list[str], ground: RGB) -> tuple[str, RGB] | None:
    for _ in range(12):
        name = rng.choice(names)
        rgb = palette.pick(name, rng)
        if palette.tells_apart(rgb, ground):
            return name, rgb
    return None


def _pick_number(
    rng: random.Random, width: int, height: int, ground: RGB, crowded: int, least: float
) -> Thing | None:
    names = ["black"] * 8 + list(COLOURS) if rng.random() < 0.6 else list(COLOURS)
    picked = _pick_rgb(rng, names, ground)
    if picked is None:
        return None
    value = pick_value(rng)
    tallest = 0.75 if not crowded else 0.4
    h = math.exp(rng.uniform(math.log(least), math.log(tallest)))
    # About 0.62 of a digit's height goes into its width; `drawing` measures the true ink.
    w = len(value) * 0.68 * h * height / width
    if w > 0.94:
        h *= 0.94 / w
        w = 0.94
    if w / len(value) < 0.034 or h < 0.1:  # under 5 of the model's 144 pixels: not legible
        return None
    spot = _pick_spot(rng, w, h)
    if spot is None:
        return None
    return Thing("number", picked[0], *spot, w, h, value, picked[1])


def _pick_spot(rng: random.Random, w: float, h: float) -> tuple[float, float] | None:
    """A centre for a box of this size, inside the picture and clear of the lines."""

    def along(extent: float) -> float | None:
        low, high = extent / 2 + 0.01, 1 - extent / 2 - 0.01
        if low > high:
            return None
        if rng.random() < 0.08 and low <= 0.5 <= high:
            return 0.5
        for _ in range(8):
            v = rng.uniform(low, high)
            if clear_of_lines(v):
                return v
        return None

    x, y = along(w), along(h)
    return None if x is None or y is None else (x, y)


def _place_shape(
    rng: random.Random,
    shapes: list[str],
    colours: list[str],
    width: int,
    height: int,
    ground: RGB,
    others: list[Thing],
    crowd: int,
    least: float,
) -> Thing | None:
    shape = rng.choice(shapes)
    picked = _pick_rgb(rng, colours, ground)
    if picked is None:
        return None
    short = min(width, height)
    biggest = {0: 0.85, 1: 0.8, 2: 0.6, 3: 0.5, 4: 0.45}[crowd]
    for _ in range(40):
        side = math.exp(rng.uniform(math.log(least), math.log(biggest))) * short
        stretch = _stretch(shape, rng)
        w, h = side * math.sqrt(stretch) / width, side / math.sqrt(stretch) / height
        if min(w, h) < 0.055 or max(w, h) > 0.97:  # 8 of the model's 144 pixels
            continue
        spot = _pick_spot(rng, w, h)
        if spot is None:
            continue
        thing = Thing(shape, picked[0], *spot, w, h, rgb=picked[1])
        if all(_apart(thing, other, width, height) for other in others):
            return thing
    return None


def _stretch(shape: str, rng: random.Random) -> float:
    """Width over height of the bounding box before the picture itself is squashed."""
    if rng.random() < 0.55:
        return 1.0
    low, high = {"diamond": (0.6, 1.5), "triangle": (0.7, 1.5)}.get(shape, (0.88, 1.14))
    return rng.uniform(low, high)


def _apart(a: Thing, b: Thing, width: int, height: int) -> bool:
    """Bounding boxes touch a little at most (in one axis by a twelfth of the smaller extent)."""
    gap_x = abs(a.x - b.x) - (a.w + b.w) / 2
    gap_y = abs(a.y - b.y) - (a.h + b.h) / 2
    if a.is_number or b.is_number:
        return max(gap_x, gap_y) > 0.012
    slack_x, slack_y = min(a.w, b.w) / 14, min(a.h, b.h) / 14
    if gap_x > -slack_x or gap_y > -slack_y:
        return True
    if a.shape == b.shape == "circle":  # boxes overlap at the corners, the circles need not
        dx, dy = (a.x - b.x) * width, (a.y - b.y) * height
        radii = (a.w * width + b.w * width) / 2
        return math.hypot(dx, dy) > radii * 0.98
    return False
