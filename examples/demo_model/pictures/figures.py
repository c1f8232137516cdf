"""Draws one shape onto a picture: filled, hollow or bordered, with hard or soft edges."""

from __future__ import annotations

import math
import random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from examples.demo_model.pictures import palette
from examples.demo_model.pictures.grounds import to_image
from examples.demo_model.pictures.outlines import Point, corners_of
from examples.demo_model.pictures.palette import RGB
from examples.demo_model.pictures.scenes import Scene, Thing


def pick_look(rng: random.Random) -> str:
    return rng.choices(("filled", "outline", "bordered", "mixed"), (0.66, 0.12, 0.12, 0.1))[0]


def draw_shape(
    picture: Image.Image,
    thing: Thing,
    scene: Scene,
    rng: random.Random,
    route: str,
    look: str,
    ink: Image.Image,
) -> None:
    if look == "mixed":
        look = rng.choice(("filled", "outline", "bordered"))
    box = (thing.w * scene.width, thing.h * scene.height)
    left = thing.x * scene.width - box[0] / 2
    top = thing.y * scene.height - box[1] / 2
    corners = None if thing.shape == "circle" else corners_of(thing.shape, rng)
    short = min(box)
    thick = max(2.0, short * rng.uniform(0.09, 0.2))
    border: RGB | None = None
    thin = 0.0
    if look == "bordered":
        border = _border_colour(thing, scene, rng)
        thin = max(1.0, short * rng.uniform(0.01, 0.045))
        if thin / short > 0.08:
            border = None
    if thing.shape in ("cross", "star") and look == "outline":
        thick = max(1.5, short * rng.uniform(0.05, 0.09))
    if short < 22 and look == "outline":
        look = "filled"
    _ink_shape(ink, thing, corners, thick / short if look == "outline" else 0.0)
    if route == "plain":
        _shape_plain(picture, thing.rgb, left, top, box, corners, look, thick, border, thin)
    else:
        fine = 3 if short < 200 else 1
        _shape_masked(
            picture,
            thing.rgb,
            left,
            top,
            box,
            corners,
            look,
            thick,
            border,
            thin,
            fine,
            blur=rng.uniform(0.3, 1.0) if route == "soft" else 0.0,
            shade=rng.uniform(-0.14, 0.14) if rng.random() < 0.2 else 0.0,
        )


def _ink_shape(ink: Image.Image, thing: Thing, corners: list[Point] | None, stroke: float) -> None:
    """The same shape onto the mask; stroke: the line's width over the shape's, 0 for filled."""
    pen, side = ImageDraw.Draw(ink), ink.width
    box = (thing.w * side, thing.h * side)
    left, top = thing.x * side - box[0] / 2, thing.y * side - box[1] / 2
    fill, outline = (None, 255) if stroke else (255, None)
    width = max(1, round(stroke * min(box)))
    if corners is None:
        pen.ellipse((left, top, left + box[0] - 1, top + box[1] - 1), fill, outline, width)
    elif stroke:
        pen.polygon(_onto(corners, left, top, box), fill, outline, width)
    else:
        pen.polygon(_onto(corners, left, top, box), fill)


def _border_colour(thing: Thing, scene: Scene, rng: random.Random) -> RGB | None:
    darker = (thing.rgb[0] // 2, thing.rgb[1] // 2, thing.rgb[2] // 2)
    options: list[RGB] = [(0, 0, 0), (0, 0, 0), darker, (255, 255, 255), (90, 90, 90)]
    # A border of the ground's own look would only shrink the shape: leave that out.
    options = [c for c in options if palette.distance(c, scene.ground) > 0.15]
    return rng.choice(options) if options else None


def _shape_plain(
    picture: Image.Image,
    rgb: RGB,
    left: float,
    top: float,
    box: Point,
    corners: list[Point] | None,
    look: str,
    thick: float,
    border: RGB | None,
    thin: float,
) -> None:
    """Draws directly onto the canvas, without smoothed edges."""
    pen = ImageDraw.Draw(picture)
    fill = None if look == "outline" else rgb
    outline = rgb if look == "outline" else border
    width = max(1, round(thick if look == "outline" else thin))
    if corners is None:
        pen.ellipse((left, top, left + box[0] - 1, top + box[1] - 1), fill, outline, width)
        return
    points = _onto(corners, left, top, box)
    if outline is None:
        pen.polygon(points, fill)
    else:
        pen.polygon(points, fill, outline, width)


def _onto(corners: list[Point], left: float, top: float, box: Point) -> list[Point]:
    return [
        (left + (x + 1) / 2 * (box[0] - 1), top + (y + 1) / 2 * (box[1] - 1)) for x, y in corners
    ]


def _shape_masked(
    picture: Image.Image,
    rgb: RGB,
    left: float,
    top: float,
    box: Point,
    corners: list[Point] | None,
    look: str,
    thick: float,
    border: RGB | None,
    thin: float,
    fine: int,
    blur: float,
    shade: float,
) -> None:
    """Through a mask drawn `fine` times larger: smooth edges, soft edges, shading."""
    x0, y0 = math.floor(left), math.floor(top)
    w, h = math.ceil(box[0]) + 2, math.ceil(box[1]) + 2

    def mask(width: float | None) -> Image.Image:
        """The filled shape, or the inner band of this width along its edge."""
        sheet = Image.new("L", (w * fine, h * fine), 0)
        pen = ImageDraw.Draw(sheet)
        size = (box[0] * fine, box[1] * fine)
        dx, dy = (left - x0) * fine, (top - y0) * fine
        line = 1 if width is None else max(1, round(width * fine))
        fill, outline = (255, None) if width is None else (None, 255)
        if corners is None:
            pen.ellipse((dx, dy, dx + size[0] - 1, dy + size[1] - 1), fill, outline, line)
        elif outline is None:
            pen.polygon(_onto(corners, dx, dy, size), fill)
        else:
            pen.polygon(_onto(corners, dx, dy, size), fill, outline, line)
        if fine > 1:
            sheet = sheet.reduce(fine)
        return sheet.filter(ImageFilter.GaussianBlur(blur)) if blur else sheet

    body = mask(thick if look == "outline" else None)
    if shade:
        ink = _shaded(rgb, (w, h), shade)
        picture.paste(ink, (x0, y0), body)
    else:
        picture.paste(rgb, (x0, y0, x0 + w, y0 + h), body)
    if border is not None:
        picture.paste(border, (x0, y0, x0 + w, y0 + h), mask(thin))


def _shaded(rgb: RGB, size: tuple[int, int], shade: float) -> Image.Image:
    """A fill that grows lighter or darker downwards; hue and name stay."""
    steps = np.linspace(1 - abs(shade), 1.0, size[1], dtype=np.float32)
    if shade < 0:
        steps = steps[::-1]
    column = np.asarray(rgb, np.float32)[None, :] * steps[:, None]
    return to_image(np.broadcast_to(column[:, None, :], (size[1], size[0], 3)))
