"""A second, deliberately different way to draw scenes, for evaluation only.

It shares no code with `drawing.py` or the random choices of `scenes.py`: pure CSS colours on a plain ground,
plain `ImageDraw` calls with aliased edges, things set out on a loose grid, numbers in a few fonts.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from examples.demo_model.pictures.scenes import SHAPES, Scene, Thing

CSS = {
    "red": ["red", "#e00000", "crimson"],
    "orange": ["orange", "darkorange"],
    "yellow": ["yellow", "gold"],
    "green": ["green", "lime", "forestgreen"],
    "blue": ["blue", "mediumblue", "dodgerblue"],
    "purple": ["purple", "darkviolet"],
    "black": ["black"],
    "white": ["white"],
}
GROUNDS = {
    "white": ["red", "orange", "green", "blue", "purple", "black"],
    "lightgrey": ["red", "green", "blue", "purple", "black"],
    "black": ["red", "orange", "yellow", "white"],
    "#202040": ["red", "orange", "yellow", "white"],
    "beige": ["red", "green", "blue", "purple", "black"],
    "grey": ["yellow", "white", "black"],
}
SIZES = [
    (224, 224),
    (336, 336),
    (640, 480),
    (480, 640),
    (300, 200),
    (512, 512),
    (800, 400),
    (128, 128),
    (1024, 768),
]
FONTS = ["DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", ""]


def _points(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    if shape == "triangle":
        return [(x, y - r), (x - r, y + r), (x + r, y + r)]
    if shape == "diamond":
        return [(x, y - r), (x + r * 0.8, y), (x, y + r), (x - r * 0.8, y)]
    if shape == "star":
        turns = [(-90 + 36 * i, r if i % 2 == 0 else r * 0.42) for i in range(10)]
        return [
            (x + d * math.cos(math.radians(a)), y + d * math.sin(math.radians(a))) for a, d in turns
        ]
    raise ValueError(shape)


def _shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, colour: str, hollow: bool
) -> None:
    fill, edge, width = (None, colour, max(3, int(r / 5))) if hollow else (colour, None, 0)
    if shape == "circle":
        pen.ellipse([x - r, y - r, x + r, y + r], fill=fill, outline=edge, width=width)
    elif shape == "square":
        pen.rectangle([x - r, y - r, x + r, y + r], fill=fill, outline=edge, width=width)
    elif shape == "cross":
        arm = r / 3
        pen.rectangle([x - arm, y - r, x + arm, y + r], fill=colour)
        pen.rectangle([x - r, y - arm, x + r, y + arm], fill=colour)
    else:
        pen.polygon(_points(shape, x, y, r), fill=fill, outline=edge, width=width)


def _font(rng: random.Random, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    name = rng.choice(FONTS)
    path = Path("/usr/share/fonts/truetype/dejavu") / name
    if name and path.exists():
        return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def draw_other(seed: int) -> tuple[Image.Image, Scene]:
    """A picture and its facts for a seed, drawn by this renderer."""
    rng = random.Random(seed)
    width, height = rng.choice(SIZES)
    ground = rng.choice(list(GROUNDS))
    colours = GROUNDS[ground]
    picture = Image.new("RGB", (width, height), ground)
    pen = ImageDraw.Draw(picture)
    name = {"white": "white", "black": "black", "grey": "grey"}.get(ground)
    things: list[Thing] = []
    with_number = rng.random() < 0.3
    spots = [(cx, cy) for cx in (1 / 6, 1 / 2, 5 / 6) for cy in (1 / 6, 1 / 2, 5 / 6)]
    rng.shuffle(spots)
    alone = with_number and rng.random() < 0.5
    unit = min(width, height)
    for cx, cy in spots[: 0 if alone else rng.randint(1, 4)]:
        colour, shape = rng.choice(colours), rng.choice(SHAPES)
        r = unit * rng.choice([0.07, 0.1, 0.14])
        x = cx * width + rng.uniform(-0.02, 0.02) * width
        y = cy * height + rng.uniform(-0.02, 0.02) * height
        _shape(pen, shape, x, y, r, rng.choice(CSS[colour]), rng.random() < 0.2)
        wide = r * (1.6 if shape == "diamond" else 1.9 if shape == "star" else 2)
        things.append(Thing(shape, colour, x / width, y / height, wide / width, 2 * r / height))
    if with_number:
        text = str(
            rng.choice([rng.randrange(10), rng.randrange(10, 100), rng.randrange(100, 1000)])
        )
        cx, cy = (0.5, 0.5) if alone else spots[5]
        size = round(height * (rng.uniform(0.25, 0.6) if alone else rng.uniform(0.17, 0.24)))
        colour = rng.choice(
            ["black", *colours] if ground != "black" and ground != "#202040" else colours
        )
        font = _font(rng, size)
        box = pen.textbbox((cx * width, cy * height), text, font=font, anchor="mm")
        pen.text(
            (cx * width, cy * height), text, fill=rng.choice(CSS[colour]), font=font, anchor="mm"
        )
        things.append(
            Thing(
                "number",
                colour,
                (box[0] + box[2]) / 2 / width,
                (box[1] + box[3]) / 2 / height,
                (box[2] - box[0]) / width,
                (box[3] - box[1]) / height,
                text,
            )
        )
    return picture, Scene(width, height, (0, 0, 0), name, things)
