"""Draws a scene, by one of several routes, so that no single renderer's habits are learnt."""

from __future__ import annotations

import glob
import io
import math
import random
from functools import lru_cache

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from shared.demo_model import palette
from shared.demo_model.palette import RGB
from shared.demo_model.scenes import Scene, Thing, clear_of_lines, pick_scene

Point = tuple[float, float]
AnyFont = ImageFont.FreeTypeFont | ImageFont.ImageFont


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
    picture = _draw_ground(scene, rng, noise)
    route = rng.choices(("plain", "smooth", "soft"), (0.45, 0.4, 0.15))[0]
    look = "filled" if easy else _pick_look(rng)
    for thing in scene.things:
        if thing.is_number:
            if not _draw_number(picture, thing, rng, ink):
                return None
        else:
            _draw_shape(picture, thing, scene, rng, route, look, ink)
    return _wear(picture, rng, noise)


# --- grounds ------------------------------------------------------------------------------------


def _draw_ground(scene: Scene, rng: random.Random, noise: np.random.Generator) -> Image.Image:
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
        return _to_image(base + strength * grain.astype(np.float32))
    if roll < 0.86:  # clouds: coarse noise blown up
        cells = rng.randrange(3, 14)
        coarse = noise.standard_normal((cells, cells, 3)) * rng.uniform(3, 14)
        small = _to_image(np.asarray(scene.ground, np.float32) + coarse.astype(np.float32))
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
    return _to_image(first + (last - first) * t[..., None])


def _pattern(size: tuple[int, int], a: RGB, b: RGB, rng: random.Random) -> Image.Image:
    """Stripes, checks, dots or paper lines in two near colours."""
    width, height = size
    picture = Image.new("RGB", size, a)
    pen = ImageDraw.Draw(picture)
    step = max(4, round(min(size) * rng.uniform(0.04, 0.2)))
    kind = rng.randrange(4)
    if kind == 0:
        for x in range(-height, width, 2 * step):
            pen.line((x, 0, x + height, height), fill=b, width=step)
    elif kind == 1:
        for row, y in enumerate(range(0, height, step)):
            for x in range((row % 2) * step, width, 2 * step):
                pen.rectangle((x, y, x + step - 1, y + step - 1), fill=b)
    elif kind == 2:
        for y in range(0, height, 2 * step):
            for x in range(0, width, 2 * step):
                pen.ellipse((x, y, x + step // 2, y + step // 2), fill=b)
    else:
        for y in range(0, height, step):
            pen.line((0, y, width, y), fill=b)
        if rng.random() < 0.5:
            for x in range(0, width, step):
                pen.line((x, 0, x, height), fill=b)
    return picture


def _to_image(pixels: np.ndarray) -> Image.Image:
    """(height, width, 3) floats in 0..255 to a picture."""
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")


# --- shapes -------------------------------------------------------------------------------------


def _pick_look(rng: random.Random) -> str:
    return rng.choices(("filled", "outline", "bordered", "mixed"), (0.66, 0.12, 0.12, 0.1))[0]


def _corners(shape: str, rng: random.Random) -> list[Point]:
    """The polygon of a shape, in the box -1..1 on both axes (stretched to fill it)."""
    if shape == "square":
        turn = 45 + (rng.uniform(-11, 11) if rng.random() < 0.25 else 0)
        points = _ring(4, turn)
    elif shape == "diamond":
        points = _ring(4, rng.uniform(-6, 6) if rng.random() < 0.15 else 0)
    elif shape == "triangle":
        roll = rng.random()
        if roll < 0.5:
            points = _ring(3, 90)
        elif roll < 0.6:
            points = _ring(3, -90)
        elif roll < 0.7:
            points = [(-1, -1), (-1, 1), (1, -1)]
            points = _turned(points, 90 * rng.randrange(4))
        else:
            points = _ring(3, rng.uniform(0, 360))
    elif shape == "star":
        tips = 5 if rng.random() < 0.92 else 6
        inner = rng.uniform(0.36, 0.5) if tips == 5 else rng.uniform(0.45, 0.58)
        turn = 90 + (rng.uniform(0, 72) if rng.random() < 0.3 else 0)
        outer_ring, inner_ring = _ring(tips, turn), _ring(tips, turn + 180 / tips)
        points = []
        for tip, notch in zip(outer_ring, inner_ring, strict=True):
            points += [tip, (notch[0] * inner, notch[1] * inner)]
    elif shape == "cross":
        a = rng.uniform(0.16, 0.42)
        points = [(-a, 1), (a, 1), (a, a), (1, a), (1, -a), (a, -a),
                  (a, -1), (-a, -1), (-a, -a), (-1, -a), (-1, a), (-a, a)]
        roll = rng.random()
        if roll < 0.12:
            points = _turned(points, 45)
        elif roll < 0.25:
            points = _turned(points, rng.uniform(-12, 12))
    else:
        raise ValueError(shape)
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    mid_x, half_x = (max(xs) + min(xs)) / 2, (max(xs) - min(xs)) / 2
    mid_y, half_y = (max(ys) + min(ys)) / 2, (max(ys) - min(ys)) / 2
    return [((x - mid_x) / half_x, -(y - mid_y) / half_y) for x, y in points]


def _ring(count: int, turn: float) -> list[Point]:
    return [
        (math.cos(math.radians(turn + 360 * i / count)),
         math.sin(math.radians(turn + 360 * i / count)))
        for i in range(count)
    ]


def _turned(points: list[Point], degrees: float) -> list[Point]:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x * c - y * s, x * s + y * c) for x, y in points]


def _draw_shape(
    picture: Image.Image, thing: Thing, scene: Scene, rng: random.Random, route: str, look: str,
    ink: Image.Image,
) -> None:
    if look == "mixed":
        look = rng.choice(("filled", "outline", "bordered"))
    box = (thing.w * scene.width, thing.h * scene.height)
    left = thing.x * scene.width - box[0] / 2
    top = thing.y * scene.height - box[1] / 2
    corners = None if thing.shape == "circle" else _corners(thing.shape, rng)
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
            picture, thing.rgb, left, top, box, corners, look, thick, border, thin, fine,
            blur=rng.uniform(0.3, 1.0) if route == "soft" else 0.0,
            shade=rng.uniform(-0.14, 0.14) if rng.random() < 0.2 else 0.0,
        )


def _ink_shape(
    ink: Image.Image, thing: Thing, corners: list[Point] | None, stroke: float
) -> None:
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
    picture: Image.Image, rgb: RGB, left: float, top: float, box: Point,
    corners: list[Point] | None, look: str, thick: float, border: RGB | None, thin: float,
) -> None:
    """Straight onto the canvas, edges not smoothed: as a ten-line script would do it."""
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
    picture: Image.Image, rgb: RGB, left: float, top: float, box: Point,
    corners: list[Point] | None, look: str, thick: float, border: RGB | None, thin: float,
    fine: int, blur: float, shade: float,
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
    return _to_image(np.broadcast_to(column[:, None, :], (size[1], size[0], 3)))


# --- numbers ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def font_files() -> tuple[str, ...]:
    """What the machine has; the font built into Pillow ("") is always there."""
    found = sorted(glob.glob("/usr/share/fonts/**/*.ttf", recursive=True))
    return ("", *found)


@lru_cache(maxsize=512)
def font(path: str, size: int) -> AnyFont:
    if not path:
        return ImageFont.load_default(size)
    return ImageFont.truetype(path, size)


def text_mask(value: str, face: AnyFont) -> Image.Image:
    """The ink of a text, cut close (mode L)."""
    left, top, right, bottom = (math.floor(v) for v in face.getbbox(value))
    sheet = Image.new("L", (right - left + 4, bottom - top + 4), 0)
    ImageDraw.Draw(sheet).text((2 - left, 2 - top), value, fill=255, font=face)
    box = sheet.getbbox()
    return sheet if box is None else sheet.crop(box)


def _draw_number(
    picture: Image.Image, thing: Thing, rng: random.Random, sheet: Image.Image
) -> bool:
    """Draws it and puts the true box into `thing`; False where it does not fit after all."""
    width, height = picture.size
    files = font_files()
    path = "" if rng.random() < 0.3 else rng.choice(files)
    target = thing.h * height
    size = max(8, round(target / 0.73 / 4) * 4 if target > 40 else round(target / 0.73))
    ink = text_mask(thing.value, font(path, size))
    if rng.random() < 0.15:
        ink = ink.rotate(rng.uniform(-9, 9), Image.Resampling.BICUBIC, expand=True)
    if rng.random() < 0.1:
        ink = ImageChops.lighter(ink, ink.filter(ImageFilter.MaxFilter(3)))
    if rng.random() < 0.12:  # edges not smoothed
        ink = ink.point(lambda v: 255 if v > 110 else 0)
    w, h = ink.width / width, ink.height / height
    fits = w / 2 + 0.006 < min(thing.x, 1 - thing.x) and h / 2 + 0.006 < min(thing.y, 1 - thing.y)
    if not fits or w / len(thing.value) < 0.03 or w > 1.25 * thing.w or h > 1.25 * thing.h:
        return False
    left, top = round(thing.x * width - ink.width / 2), round(thing.y * height - ink.height / 2)
    picture.paste(thing.rgb, (left, top, left + ink.width, top + ink.height), ink)
    thing.w, thing.h = w, h
    side = sheet.width
    small = ink.resize((max(1, round(w * side)), max(1, round(h * side))), Image.Resampling.BOX)
    sheet.paste(small, (round((thing.x - w / 2) * side), round((thing.y - h / 2) * side)))
    assert clear_of_lines(thing.x) and clear_of_lines(thing.y)
    return True


# --- wear ---------------------------------------------------------------------------------------


def _wear(picture: Image.Image, rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """What happens to pictures on their way: compression, blur, noise, few colours."""
    if rng.random() < 0.08:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    if rng.random() < 0.1:
        grain = noise.standard_normal((picture.height, picture.width, 1), np.float32)
        picture = _to_image(np.asarray(picture, np.float32) + rng.uniform(2, 9) * grain)
    if rng.random() < 0.28:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=rng.randrange(35, 96))
        picture = Image.open(buffer).convert("RGB")
    elif rng.random() < 0.05:
        picture = picture.quantize(rng.choice((16, 32, 64))).convert("RGB")
    return picture
