"""The eight colour names, and the RGB values that clearly belong to each."""

from __future__ import annotations

import colorsys
import random

RGB = tuple[int, int, int]

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")

# Values that other people's programs use under these names (CSS, X11, plotting and UI palettes).
ANCHORS: dict[str, tuple[RGB, ...]] = {
    "red": (
        (255, 0, 0),
        (220, 20, 60),
        (178, 34, 34),
        (214, 39, 40),
        (239, 68, 68),
        (200, 0, 0),
        (231, 76, 60),
        (244, 67, 54),
        (230, 25, 25),
    ),
    "orange": (
        (255, 165, 0),
        (255, 140, 0),
        (255, 127, 14),
        (249, 115, 22),
        (243, 156, 18),
        (255, 152, 0),
        (245, 130, 32),
        (255, 150, 0),
    ),
    "yellow": (
        (255, 255, 0),
        (255, 215, 0),
        (250, 220, 40),
        (255, 235, 59),
        (241, 225, 15),
        (234, 219, 8),
        (255, 230, 0),
    ),
    "green": (
        (0, 128, 0),
        (0, 255, 0),
        (34, 139, 34),
        (50, 205, 50),
        (44, 160, 44),
        (34, 197, 94),
        (76, 175, 80),
        (46, 204, 113),
        (0, 160, 0),
        (0, 100, 0),
    ),
    "blue": (
        (0, 0, 255),
        (30, 144, 255),
        (65, 105, 225),
        (31, 119, 180),
        (59, 130, 246),
        (33, 150, 243),
        (0, 0, 200),
        (52, 152, 219),
        (0, 0, 139),
    ),
    "purple": (
        (128, 0, 128),
        (160, 32, 240),
        (148, 0, 211),
        (155, 89, 182),
        (156, 39, 176),
        (147, 51, 234),
        (148, 103, 189),
        (138, 43, 226),
        (102, 51, 153),
    ),
    "black": ((0, 0, 0), (20, 20, 20), (17, 17, 17), (10, 10, 15)),
    "white": ((255, 255, 255), (250, 250, 250), (245, 245, 245), (255, 255, 250)),
}

# (hue low, hue high) in degrees, (saturation), (value): kept well inside the colour's own region.
RANGES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-11, 7), (0.75, 1.0), (0.6, 1.0)),
    "orange": ((23, 39), (0.8, 1.0), (0.88, 1.0)),
    "yellow": ((51, 62), (0.65, 1.0), (0.87, 1.0)),
    "green": ((92, 148), (0.45, 1.0), (0.38, 1.0)),
    "blue": ((206, 245), (0.6, 1.0), (0.5, 1.0)),
    "purple": ((270, 298), (0.45, 1.0), (0.42, 0.9)),
    "black": ((0, 360), (0.0, 0.4), (0.0, 0.12)),
    "white": ((0, 360), (0.0, 0.04), (0.95, 1.0)),
    "grey": ((0, 360), (0.0, 0.06), (0.35, 0.72)),
}


def from_hsv(hue: float, saturation: float, value: float) -> RGB:
    """Hue in degrees (any turn), the others 0..1, to 8-bit RGB."""
    r, g, b = colorsys.hsv_to_rgb((hue % 360) / 360, saturation, value)
    return round(r * 255), round(g * 255), round(b * 255)


def pick(name: str, rng: random.Random) -> RGB:
    """A random RGB value that is clearly `name`."""
    if name in ANCHORS and rng.random() < 0.45:
        return rng.choice(ANCHORS[name])
    hue, saturation, value = RANGES[name]
    return from_hsv(rng.uniform(*hue), rng.uniform(*saturation), rng.uniform(*value))


def distance(a: RGB, b: RGB) -> float:
    """0 (same) .. 1 (black to white): a weighted distance close to perceived difference."""
    mean = (a[0] + b[0]) / 510
    dr, dg, db = ((x - y) / 255 for x, y in zip(a, b, strict=True))
    squares = (2 + mean) * dr * dr + 4 * dg * dg + (3 - mean) * db * db
    return float((squares / 9) ** 0.5)


def tells_apart(thing: RGB, ground: RGB) -> bool:
    """Whether a thing of this colour is seen well, and under another name, on this ground."""
    if distance(thing, ground) < 0.3:
        return False
    h1, s1, v1 = colorsys.rgb_to_hsv(*(c / 255 for c in thing))
    h2, s2, v2 = colorsys.rgb_to_hsv(*(c / 255 for c in ground))
    turn = abs(h1 - h2)
    hue_gap = min(turn, 1 - turn) * 360
    coloured = min(s1, s2) > 0.25 and min(v1, v2) > 0.25
    if coloured:
        return hue_gap > 28
    return True


def pick_ground(rng: random.Random) -> tuple[RGB, str | None]:
    """A ground colour, and its name if it clearly has one."""
    roll = rng.random()
    if roll < 0.27:
        return pick("white", rng), "white"
    if roll < 0.37:
        return pick("black", rng), "black"
    if roll < 0.52:
        return pick("grey", rng), "grey"
    if roll < 0.67:
        name = rng.choice(COLOURS[:6])
        return pick(name, rng), name
    if roll < 0.83:  # pastel
        return from_hsv(rng.uniform(0, 360), rng.uniform(0.06, 0.3), rng.uniform(0.85, 1)), None
    if roll < 0.93:  # dark
        return from_hsv(rng.uniform(0, 360), rng.uniform(0.1, 0.8), rng.uniform(0.12, 0.3)), None
    return from_hsv(rng.uniform(0, 360), rng.uniform(0.1, 0.6), rng.uniform(0.3, 0.9)), None
