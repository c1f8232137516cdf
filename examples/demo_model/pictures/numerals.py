"""Draws the printed number, in whatever fonts there are."""

from __future__ import annotations

import glob
import math
import random
from functools import lru_cache

from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from examples.demo_model.pictures.scenes import Thing, clear_of_lines

AnyFont = ImageFont.FreeTypeFont | ImageFont.ImageFont


@lru_cache(maxsize=1)
def font_files() -> tuple[str, ...]:
    """Font files of this machine, and "" for the font built into Pillow."""
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


def draw_number(picture: Image.Image, thing: Thing, rng: random.Random, sheet: Image.Image) -> bool:
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
