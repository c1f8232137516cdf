"""What lies behind the things: plain, graded, grainy, cloudy or patterned."""

from __future__ import annotations

import math
import random

import numpy as np
from PIL import Image, ImageDraw

from examples.demo_model.pictures.palette import RGB
from examples.demo_model.pictures.scenes import Scene


def draw_ground(scene: Scene, rng: random.Random, noise: np.random.Generator) -> Image.Image:
    size = (scene.width, scene.height)
    roll = rng.random()
    if roll < 0.5:
        return Image.new("RGB", size, scene.ground)
    if roll < 0.62:  # a slight gradient
        return _gradient(size, _near(scene.ground, rng, 26), _near(scene.ground, rng, 26), rng)
    if roll < 0.76:  # grain
        strength = rng.uniform(2, 16)
        grain = noise.standard_normal((scene.height, scene.width, 1 if roll < 0.7 else 3))
        base = np.asarray(scene.ground, np.float32)
        return to_image(base + strength * grain.astype(np.float32))
    if roll < 0.86:  # clouds: coarse noise blown up
        cells = rng.randrange(3, 14)
        coarse = noise.standard_normal((cells, cells, 3)) * rng.uniform(3, 14)
        small = to_image(np.asarray(scene.ground, np.float32) + coarse.astype(np.float32))
        return small.resize(size, Image.Resampling.BICUBIC)
    return _pattern(size, scene.ground, _near(scene.ground, rng, 20), rng)


def _near(colour: RGB, rng: random.Random, most: int) -> RGB:
    """A colour within `most` levels, so that the ground keeps its name and its contrast."""
    shift = rng.uniform(-most, most)
    return tuple(  # type: ignore[return-value]
        min(255, max(0, round(c + shift + rng.uniform(-most / 4, most / 4)))) for c in colour
    )


def _gradient(size: tuple[int, int], a: RGB, b: RGB, rng: random.Random) -> Image.Image:
    width, height = size
    angle = rng.uniform(0, 2 * math.pi)
    x = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    if rng.random() < 0.3:
        t = np.sqrt(x * x + y * y) / math.sqrt(2)
    else:
        t = (x * math.cos(angle) + y * math.sin(angle)) / 2.83 + 0.5
    first, last = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return to_image(first + (last - first) * t[..., None])


def _pattern(size: tuple[int, int], a: RGB, b: RGB, rng: random.Random) -> Image.Image:
    """Stripes, checks, dots or paper lines in two near colours."""
    width, height = size
    picture = Image.new("RGB", size, a)
    pen = ImageDraw.Draw(picture)
    step = max(4, round(min(size) * rng.uniform(0.04, 0.2)))
    kind = rng.choice(("stripes", "checks", "dots", "lines"))
    if kind == "stripes":
        for x in range(-height, width, 2 * step):
            pen.line((x, 0, x + height, height), fill=b, width=step)
    elif kind == "lines":
        for y in range(0, height, step):
            pen.line((0, y, width, y), fill=b)
        for x in range(0, width if rng.random() < 0.5 else 0, step):
            pen.line((x, 0, x, height), fill=b)
    else:
        for row, y in enumerate(range(0, height, step)):
            for x in range((row % 2) * step, width, 2 * step):
                if kind == "checks":
                    pen.rectangle((x, y, x + step - 1, y + step - 1), fill=b)
                else:
                    pen.ellipse((x, y, x + step // 2, y + step // 2), fill=b)
    return picture


def to_image(pixels: np.ndarray) -> Image.Image:
    """(height, width, 3) floats in 0..255 to a picture."""
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")
