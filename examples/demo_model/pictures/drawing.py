"""Draws a scene in one of several ways, so that the model does not learn the traits of one renderer."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image, ImageFilter

from examples.demo_model.pictures.figures import draw_shape, pick_look
from examples.demo_model.pictures.grounds import draw_ground, to_image
from examples.demo_model.pictures.numerals import draw_number
from examples.demo_model.pictures.scenes import Scene, pick_scene

INK_SIDE = 72  # pixels of the mask that says where things were drawn: 8 x 8 to a patch


def draw(seed: int, largest: int = 420) -> tuple[Image.Image, Scene]:
    """The picture (RGB) and the facts that belong to this seed; the same ones every time."""
    picture, scene, _ = draw_with_ink(seed, largest)
    return picture, scene


def draw_with_ink(
    seed: int, largest: int = 420, easy: bool = False
) -> tuple[Image.Image, Scene, Image.Image]:
    """The same, and the mask (mode L, 72 x 72 whatever the picture's shape) of what was drawn."""
    rng = random.Random(seed)
    while True:
        scene = pick_scene(rng, largest, easy)
        ink = Image.new("L", (INK_SIDE, INK_SIDE), 0)
        picture = _draw_scene(scene, rng, ink, easy)
        if picture is not None:
            return picture, scene, ink


def _draw_scene(
    scene: Scene, rng: random.Random, ink: Image.Image, easy: bool
) -> Image.Image | None:
    noise = np.random.default_rng(rng.getrandbits(32))
    picture = draw_ground(scene, rng, noise)
    route = rng.choices(("plain", "smooth", "soft"), (0.45, 0.4, 0.15))[0]
    look = "filled" if easy else pick_look(rng)
    for thing in scene.things:
        if thing.is_number:
            if not draw_number(picture, thing, rng, ink):
                return None
        else:
            draw_shape(picture, thing, scene, rng, route, look, ink)
    return _wear(picture, rng, noise)


def _wear(picture: Image.Image, rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """Degrades a picture: compression, blur, noise, few colours."""
    if rng.random() < 0.08:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    if rng.random() < 0.1:
        grain = noise.standard_normal((picture.height, picture.width, 1), np.float32)
        picture = to_image(np.asarray(picture, np.float32) + rng.uniform(2, 9) * grain)
    if rng.random() < 0.28:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=rng.randrange(35, 96))
        picture = Image.open(buffer).convert("RGB")
    elif rng.random() < 0.05:
        picture = picture.quantize(rng.choice((16, 32, 64))).convert("RGB")
    return picture
