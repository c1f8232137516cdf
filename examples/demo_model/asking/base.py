"""What every kind of question needs: names, references, sentences."""

from __future__ import annotations

import random
from dataclasses import dataclass

from examples.demo_model import words
from examples.demo_model.pictures.scenes import Scene, Thing
from examples.demo_model.words import COLOUR_WORDS, PLACE, SHAPE_WORDS


@dataclass(slots=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str
    kind: str
    focus: Thing | None = None  # what "it" means in the next question
    counted: str | None = None  # the shape, where its number is all that is asked
    role: str = "user"  # or "tool": who says `question`


class Asker:
    """Asks about one scene in one language."""

    def __init__(self, scene: Scene, language: str, rng: random.Random) -> None:
        self.scene, self.language, self.rng = scene, language, rng
        self.en = language == "en"

    def say(self, en: str, zh: str) -> str:
        return words.say(en if self.en else zh, self.rng)

    def shape_name(self, shape: str, asked: bool = False, many: bool = False) -> str:
        names = SHAPE_WORDS[self.language][shape]
        name = self.rng.choice(names) if asked else names[0]
        return words.plural(name) if many and self.en else name

    def colour_name(self, colour: str, asked: bool = False) -> str:
        names = COLOUR_WORDS[self.language][colour]
        return self.rng.choice(names) if asked else names[0]

    def both(self, thing: Thing, asked: bool = False) -> str:
        """ "red circle", "红色的圆形" """
        colour = self.colour_name(thing.colour, asked)
        shape = self.shape_name(thing.shape, asked)
        if self.en:
            return f"{colour} {shape}"
        between = self.rng.choice(("的", "的", "", "")) if asked else "的"
        if asked and self.rng.random() < 0.15:
            colour, between = colour.removesuffix("色"), ""
        return f"{colour}{between}{shape}"

    def the(self, phrase: str) -> str:
        return f"the {phrase}" if self.en else phrase

    def unique(self, shape: str | None = None, colour: str | None = None) -> bool:
        return len(self.matching(shape, colour, with_number=shape is None)) == 1

    def matching(
        self, shape: str | None = None, colour: str | None = None, with_number: bool = False
    ) -> list[Thing]:
        pool = self.scene.things if with_number or shape == "number" else self.scene.shapes
        return [t for t in pool if shape in (None, t.shape) and colour in (None, t.colour)]

    def refer(self, thing: Thing, hide: str = "") -> tuple[str, str] | None:
        """How a question may call this one thing, and how the answer will: without `hide`."""
        options: list[tuple[str, str]] = []
        if thing.is_number:
            if hide == "shape":
                return None
            name = self.say(
                "the [number|number|digit[s|]|printed number]", "[数字|数字|图里的数字|这个数字]"
            )
            return name, self.the(self.shape_name("number"))
        if self.unique(shape=thing.shape) and hide != "shape":
            options += [
                (
                    self.the(self.shape_name(thing.shape, True)),
                    self.the(self.shape_name(thing.shape)),
                )
            ] * 2
        if self.unique(thing.shape, thing.colour) and hide not in ("shape", "colour"):
            options.append((self.the(self.both(thing, True)), self.the(self.both(thing))))
        if self.unique(colour=thing.colour) and hide != "colour":
            colour = self.colour_name(thing.colour, True)
            name = self.say(
                f"the {colour} [shape|thing|one|object|figure]",
                f"{colour}的[形状|图形|东西|那个|物体|]",
            )
            options.append((name, self.the(self.both(thing))))
        return self.rng.choice(options) if options else None

    def pick(self, pool: list[Thing] | None = None) -> Thing | None:
        pool = self.scene.things if pool is None else pool
        return self.rng.choice(pool) if pool else None

    def in_picture(self) -> str:
        return self.say(
            "[| in the picture| in the image| in this picture| in this image| in the photo| here]",
            "",
        )

    def pic(self) -> str:
        """Chinese for "in the picture", or nothing."""
        return words.say("[|图里|图中|图片里|图片中|这张图里|画面中|图上|画里|这幅图中]", self.rng)

    def sentence(self, body: str) -> str:
        """An answer: capital and full stop."""
        return body[0].upper() + body[1:] + "." if self.en else body + "。"

    def _only(self) -> Thing | None:
        return self.scene.things[0] if len(self.scene.things) == 1 else None

    def _is_colour(self, ref: str, colour: str) -> str:
        name = self.colour_name(colour)
        return f"{ref} is {name}" if self.en else f"{ref}是{name}的"

    def _is_at(self, ref: str, thing: Thing) -> str:
        place = PLACE[self.language][thing.cell]
        return f"{ref} is {place}" if self.en else f"{ref}在{place}"

    def _is_value(self, number: Thing) -> str:
        return f"the number is {number.value}" if self.en else f"数字是{number.value}"

    def _pair(self, pool: list[Thing]) -> tuple[Thing, Thing] | None:
        if len(pool) < 2:
            return None
        a, b = self.rng.sample(pool, 2)
        return a, b

    def count_body(self, n: int, shape: str | None, colour: str | None) -> str:
        if self.en:
            noun = (
                self.shape_name(shape or "", many=n != 1)
                if shape
                else ("shape" if n == 1 else "shapes")
            )
            if colour:
                noun = f"{self.colour_name(colour)} {noun}"
            return f"there {'is' if n == 1 else 'are'} {n if n else 'no'} {noun}"
        noun = self.shape_name(shape) if shape else "形状"
        if colour:
            noun = f"{self.colour_name(colour)}的{noun}"
        return f"图中有{n}个{noun}" if n else f"图中没有{noun}"


def alternatives(template: str) -> list[str]:
    """The alternatives of "a|[b|c]|d" outside of brackets: here a, [b|c] and d."""
    parts, depth, last = [], 0, 0
    for at, character in enumerate(template):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "|" and depth == 0:
            parts.append(template[last:at])
            last = at + 1
    parts.append(template[last:])
    return parts
