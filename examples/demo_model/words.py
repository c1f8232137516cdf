"""The words of both languages: names, places, and a small grammar for phrasings."""

from __future__ import annotations

import random
import re

LANGUAGES = ("en", "zh")

# The first name is the one answers use; the others are understood in questions.
SHAPE_WORDS = {
    "en": {
        "circle": ("circle", "circle", "circle", "disc", "disk", "round shape", "ball", "ring"),
        "square": ("square", "square", "square", "box", "rectangle"),
        "triangle": ("triangle",),
        "star": ("star",),
        "diamond": ("diamond", "diamond", "rhombus"),
        "cross": ("cross", "cross", "cross", "plus", "plus sign"),
        "number": ("number",),
    },
    "zh": {
        "circle": ("圆形", "圆形", "圆", "圆圈", "圆"),
        "square": ("正方形", "正方形", "方形", "方块", "矩形"),
        "triangle": ("三角形", "三角形", "三角"),
        "star": ("星形", "五角星", "星星", "星形", "星"),
        "diamond": ("菱形", "菱形", "钻石形"),
        "cross": ("十字形", "十字", "十字形", "加号", "十字架"),
        "number": ("数字",),
    },
}
PLURAL = {"box": "boxes", "cross": "crosses", "rhombus": "rhombuses", "plus": "pluses"}
COLOUR_WORDS = {
    "en": {
        "red": ("red",),
        "orange": ("orange",),
        "yellow": ("yellow",),
        "green": ("green",),
        "blue": ("blue",),
        "purple": ("purple", "purple", "purple", "violet"),
        "black": ("black",),
        "white": ("white",),
        "grey": ("grey", "gray"),
    },
    "zh": {
        "red": ("红色",),
        "orange": ("橙色", "橙色", "橘色", "橘黄色"),
        "yellow": ("黄色",),
        "green": ("绿色",),
        "blue": ("蓝色",),
        "purple": ("紫色",),
        "black": ("黑色",),
        "white": ("白色",),
        "grey": ("灰色",),
    },
}
# Where a thing is: "The circle is in the top left."
PLACE = {
    "en": {
        "top left": "in the top left",
        "top": "at the top",
        "top right": "in the top right",
        "left": "on the left",
        "centre": "in the centre",
        "right": "on the right",
        "bottom left": "in the bottom left",
        "bottom": "at the bottom",
        "bottom right": "in the bottom right",
    },
    "zh": {
        "top left": "左上角",
        "top": "上方",
        "top right": "右上角",
        "left": "左边",
        "centre": "中间",
        "right": "右边",
        "bottom left": "左下角",
        "bottom": "下方",
        "bottom right": "右下角",
    },
}
PLACE_ASKED = {
    "en": {
        "top left": "[in|at] the [top|upper] left[ corner|]",
        "top": "[at|on|near] the top",
        "top right": "[in|at] the [top|upper] right[ corner|]",
        "left": "on the left[ side| hand side|]",
        "centre": "in the [centre|center|middle]",
        "right": "on the right[ side| hand side|]",
        "bottom left": "[in|at] the [bottom|lower] left[ corner|]",
        "bottom": "[at|on|near] the bottom",
        "bottom right": "[in|at] the [bottom|lower] right[ corner|]",
    },
    "zh": {
        "top left": "左上[角|方|]",
        "top": "[上方|上面|顶部|上边]",
        "top right": "右上[角|方|]",
        "left": "[左边|左侧|左面]",
        "centre": "[中间|中央|中心|正中间]",
        "right": "[右边|右侧|右面]",
        "bottom left": "左下[角|方|]",
        "bottom": "[下方|下面|底部|下边]",
        "bottom right": "右下[角|方|]",
    },
}
# How one thing lies to another: "The circle is above the square."
RELATION = {
    "en": {
        "left": "to the left of",
        "right": "to the right of",
        "above": "above",
        "below": "below",
        "above left": "above and to the left of",
        "above right": "above and to the right of",
        "below left": "below and to the left of",
        "below right": "below and to the right of",
    },
    "zh": {
        "left": "左边",
        "right": "右边",
        "above": "上方",
        "below": "下方",
        "above left": "左上方",
        "above right": "右上方",
        "below left": "左下方",
        "below right": "右下方",
    },
}
RELATION_ASKED = {
    "en": {
        "left": "[to the left of|left of|on the left of|on the left side of]",
        "right": "[to the right of|right of|on the right of|on the right side of]",
        "above": "[above|over|higher than|on top of]",
        "below": "[below|under|beneath|lower than|underneath]",
    },
    "zh": {
        "left": "[左边|左侧|左面]",
        "right": "[右边|右侧|右面]",
        "above": "[上方|上面|上边]",
        "below": "[下方|下面|下边]",
    },
}
COUNT_WORDS = {
    "en": ("no", "one", "two", "three", "four", "five"),
    "zh": ("零", "一", "两", "三", "四", "五"),
}

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def say(template: str, rng: random.Random) -> str:
    """One phrasing of a template: "[what|which] is it" chooses, innermost brackets first."""
    while True:
        match = _CHOICE.search(template)
        if match is None:
            return template
        choice = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + choice + template[match.end() :]


def plural(word: str) -> str:
    """The English plural of one of our nouns."""
    first, _, last = word.rpartition(" ")
    return f"{first} {PLURAL.get(last, last + 's')}".strip()


def article(phrase: str) -> str:
    """ "a red circle", "an orange circle"."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def join(parts: list[str], language: str) -> str:
    """ "a, b and c"; in Chinese with its own comma."""
    if len(parts) == 1:
        return parts[0]
    if language == "en":
        return ", ".join(parts[:-1]) + " and " + parts[-1]
    return "、".join(parts[:-1]) + "和" + parts[-1]
