"""Judges answers by their facts, whatever their wording."""

from __future__ import annotations

import json
import re
from collections import Counter

from examples.demo_model.calling import CALL_CLOSE, CALL_OPEN
from examples.demo_model.words import COLOUR_WORDS, COUNT_WORDS, SHAPE_WORDS

Facts = Counter[tuple[str, ...]]

_EN_PLACES = {
    "top left": "top left",
    "upper left": "top left",
    "top right": "top right",
    "upper right": "top right",
    "bottom left": "bottom left",
    "lower left": "bottom left",
    "bottom right": "bottom right",
    "lower right": "bottom right",
    "centre": "centre",
    "center": "centre",
    "middle": "centre",
    "top": "top",
    "bottom": "bottom",
    "left": "left",
    "right": "right",
    "above": "above",
    "below": "below",
}
_ZH_PLACES = {
    "左上": "top left",
    "右上": "top right",
    "左下": "bottom left",
    "右下": "bottom right",
    "中间": "centre",
    "上方": "top",
    "下方": "bottom",
    "左边": "left",
    "右边": "right",
}


def _en_slots(clause: str) -> list[str]:
    slots = []
    names = {name: c for c, forms in COLOUR_WORDS["en"].items() for name in forms}
    for shape, forms in SHAPE_WORDS["en"].items():
        for form in forms:
            names[form] = shape
            names[form + "s"] = shape
    names |= {
        "crosses": "cross",
        "boxes": "square",
        "shape": "shape",
        "shapes": "shape",
        "background": "background",
        "larger": "larger",
        "smaller": "smaller",
        "bigger": "larger",
        "largest": "largest",
        "smallest": "smallest",
        "biggest": "largest",
        "nothing": "none",
        "yes": "yes",
        "not": "no",
    }
    names |= {word: str(n) for n, word in enumerate(COUNT_WORDS["en"]) if n > 1}
    names |= {"a": "1", "an": "1", "no": "no"} | _EN_PLACES
    longest_first = sorted(names, key=len, reverse=True)
    pattern = r"\d+|\b(?:" + "|".join(map(re.escape, longest_first)) + r")\b"
    for found in re.findall(pattern, clause):
        slots.append(names.get(found, found))
    return slots


def _zh_slots(clause: str) -> list[str]:
    names = {name: c for c, forms in COLOUR_WORDS["zh"].items() for name in forms}
    names |= {form: s for s, forms in SHAPE_WORDS["zh"].items() for form in forms if len(form) > 1}
    names |= {
        "形状": "shape",
        "背景": "background",
        "更大": "larger",
        "更小": "smaller",
        "最大": "largest",
        "最小": "smallest",
        "什么都没有": "none",
        "没有": "no",
        "不是": "no",
        "是的": "yes",
        "有，": "yes",
        "一个": "1",
        "两个": "2",
        "比": "than",
        "大": "larger",
        "小": "smaller",
    }
    names |= _ZH_PLACES
    longest_first = sorted(names, key=len, reverse=True)
    pattern = r"\d+|" + "|".join(map(re.escape, longest_first))
    return [names.get(found, found) for found in re.findall(pattern, clause)]


def facts(answer: str) -> Facts:
    """What a sentence claims: a bag of clauses, each a tuple of its slots in order.

    Lists may come in any order ("a red circle and a blue square"); what belongs together stays
    together. A sentence without a single slot is itself (small talk). In JSON each object of a list is a
    clause, and each other field; a call of a tool is the JSON within it, and no part of it may differ.
    """
    body = answer.strip().removeprefix(CALL_OPEN).removesuffix(CALL_CLOSE)
    called = body != answer.strip()
    if body.lstrip().startswith("{"):
        return _json_facts(body, called)
    text = re.sub(r"\s+", " ", answer.strip().lower()).rstrip(".。!！")
    if any(c >= "\u4e00" for c in text):
        text = text.replace("有，", "yes，", 1) if text.startswith("有，") else text
        clauses = re.split(r"[，、]|和(?=一个|\d|数字|.{1,2}色)", text)
        slots = [_zh_slots(c) + (["yes"] if c == "yes" else []) for c in clauses]
    else:
        # "above and to the left of" is one place, "a circle and a square" are two things.
        text = re.sub(r"(above|below) and to the (left|right) of", r"\1 \2", text)
        clauses = re.split(r", | and ", text)
        slots = [_en_slots(c) for c in clauses]
    bag: Facts = Counter(tuple(s) for s in slots if s)
    return bag or Counter([(text,)])


def _json_facts(text: str, called: bool) -> Facts:
    try:
        told = json.loads(text)
    except ValueError:
        return Counter([("broken json", text)])
    if called:
        return Counter([("call", json.dumps(told, sort_keys=True))])
    bag: Facts = Counter()
    for field, value in told.items():
        if isinstance(value, list):
            bag.update((field, json.dumps(one, sort_keys=True)) for one in value)
            bag[field, "list"] += 1
        else:
            bag[field, json.dumps(value)] += 1
    return bag


def right(answer: str, truth: str) -> bool:
    """Whether an answer states exactly the true facts, no more and no fewer."""
    same_language = _chinese(answer) == _chinese(truth)
    return same_language and facts(answer) == facts(truth)


def _chinese(text: str) -> bool:
    return any("\u4e00" <= c <= "\u9fff" for c in text)
