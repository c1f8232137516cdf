"""Yes-or-no questions about things in the picture."""

from __future__ import annotations

from examples.demo_model import words
from examples.demo_model.asking.base import Asker, Turn, alternatives
from examples.demo_model.asking.relations import differs, relation_of
from examples.demo_model.pictures.palette import COLOURS
from examples.demo_model.pictures.scenes import CELLS, SHAPES, Thing
from examples.demo_model.words import COUNT_WORDS, PLACE_ASKED, RELATION, RELATION_ASKED


class YesNo(Asker):
    """Yes and no."""

    def confirm(self) -> Turn | None:
        """Questions for yes or no about things that are there."""
        form = self.rng.choices(
            (
                self.confirm_colour,
                self._confirm_relation,
                self._confirm_place,
                self._confirm_count,
                self._confirm_number,
                self._confirm_larger,
                self._confirm_shape,
            ),
            (0.26, 0.24, 0.14, 0.1, 0.08, 0.12, 0.06),
        )[0]
        return form()

    def _verdict(self, yes: bool, body: str) -> str:
        if self.en:
            return ("Yes, " if yes else "No, ") + body + "."
        return ("是的，" if yes else "不是，") + body + "。"

    def confirm_colour(self, thing: Thing | None = None, it: str = "") -> Turn | None:
        target = thing or self.pick()
        if target is None:
            return None
        ref = self.refer(target, hide="colour")
        if ref is None:
            return None
        yes = self.rng.random() < 0.5
        colour = (
            target.colour if yes else self.rng.choice([c for c in COLOURS if c != target.colour])
        )
        name, asked = self.colour_name(colour, True), it or ref[0]
        q = self.say(
            f"is {asked} [|actually |really ]{name}|does {asked} look {name}"
            f"|is the [colour|color] of {asked} {name}|{asked} is {name}, [right|isn't it]",
            f"{asked}是{name}[的|]吗|{asked}是不是{name}[的|]|{asked}的颜色是{name}吗",
        )
        q = self.rng.choice(alternatives(q))
        body = self._is_colour(ref[1], target.colour)
        return Turn(q, self._verdict(yes, body), "confirm", target)

    def _confirm_shape(self) -> Turn | None:
        target = self.pick(self.scene.shapes)
        if target is None or not self.unique(colour=target.colour):
            return None
        yes = self.rng.random() < 0.5
        shape = target.shape if yes else self.rng.choice([s for s in SHAPES if s != target.shape])
        colour = self.colour_name(target.colour, True)
        asked = self.shape_name(shape, True)
        q = self.say(
            f"is the {colour} [shape|thing|one|object] {words.article(asked)}",
            f"{colour}的[形状|东西|图形|那个|]是{asked}吗",
        )
        name, colour = self.shape_name(target.shape), self.colour_name(target.colour)
        body = (
            f"the {colour} shape is {words.article(name)}" if self.en else f"{colour}的形状是{name}"
        )
        return Turn(q, self._verdict(yes, body), "confirm", target)

    def _confirm_relation(self) -> Turn | None:
        pair = self._pair(self.scene.things)
        if pair is None:
            return None
        a, b = pair
        ref_a, ref_b, relation = self.refer(a), self.refer(b), relation_of(a, b)
        if ref_a is None or ref_b is None or relation is None:
            return None
        held = relation.split()
        yes = self.rng.random() < 0.5
        opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
        asked = self.rng.choice(held)
        if not yes:
            asked = opposite[asked]
        words_asked = words.say(RELATION_ASKED[self.language][asked], self.rng)
        q = self.say(
            f"is {ref_a[0]} {words_asked} {ref_b[0]}",
            f"{ref_a[0]}在{ref_b[0]}的{words_asked}吗|{ref_a[0]}是不是在{ref_b[0]}{words_asked}"
            f"|{ref_a[0]}在{ref_b[0]}{words_asked}吗|{ref_a[0]}在不在{ref_b[0]}的{words_asked}",
        )
        q = self.rng.choice(alternatives(q))
        place = RELATION[self.language][relation]
        body = (
            f"{ref_a[1]} is {place} {ref_b[1]}" if self.en else f"{ref_a[1]}在{ref_b[1]}的{place}"
        )
        return Turn(q, self._verdict(yes, body), "confirm", a)

    def _confirm_place(self) -> Turn | None:
        target = self.pick()
        ref = self.refer(target) if target else None
        if target is None or ref is None:
            return None
        yes = self.rng.random() < 0.5
        if yes:
            cell = target.cell
        else:  # a ninth that no wide reading of "left" or "top" could mean
            parts = set(target.cell.split())
            wrong = [c for c in CELLS if not parts & set(c.split())]
            cell = self.rng.choice(wrong)
        asked = words.say(PLACE_ASKED[self.language][cell], self.rng)
        if yes and " " in cell and self.rng.random() < 0.4:
            asked = words.say(PLACE_ASKED[self.language][self.rng.choice(cell.split())], self.rng)
        q = self.say(
            f"is {ref[0]} {asked}[| of the picture| of the image]",
            f"{ref[0]}在[|图的|图片的|图中]{asked}吗|{ref[0]}是不是在{asked}",
        )
        q = self.rng.choice(alternatives(q))
        return Turn(q, self._verdict(yes, self._is_at(ref[1], target)), "confirm", target)

    def _confirm_count(self) -> Turn | None:
        shape = self.rng.choice([t.shape for t in self.scene.shapes] or ["circle"])
        whole = self.rng.random() < 0.4
        n = len(self.matching(None if whole else shape))
        yes = self.rng.random() < 0.5
        asked = n if yes else self.rng.choice([k for k in (1, 2, 3, 4) if k != n])
        if asked < 1 or n < 1:
            return None
        number = str(asked) if self.rng.random() < 0.4 else COUNT_WORDS[self.language][asked]
        if self.en:
            noun = "shape" if whole else self.shape_name(shape, True)
            noun = words.plural(noun) if asked != 1 else noun
            q = self.say(f"[are|is] there [|exactly ]{number} {noun}{self.in_picture()}", "")
            q = (
                q.replace("is there", "are there")
                if asked > 1
                else q.replace("are there", "is there exactly").replace(
                    "exactly exactly", "exactly"
                )
            )
            if asked == 1 and "exactly" not in q:
                q = q.replace("is there ", "is there only ")
        else:
            noun = "形状" if whole else self.shape_name(shape, True)
            q = self.say("", f"{self.pic()}[是不是|]有{number}个{noun}吗").replace(
                "是不是有", "是不是有"
            )
            q = q.removesuffix("吗") if "是不是" in q else q
            if asked == 1:
                q = q.replace("有", "只有")
        body = self.count_body(n, None if whole else shape, None)
        return Turn(q, self._verdict(yes, body), "confirm")

    def _confirm_number(self) -> Turn | None:
        number = self.scene.number
        if number is None:
            return None
        yes = self.rng.random() < 0.5
        value = number.value
        if not yes:
            at = self.rng.randrange(len(value))
            digit = self.rng.choice([d for d in "123456789" if d != value[at]])
            value = value[:at] + digit + value[at + 1 :]
        q = self.say(
            f"is the [number|printed number|digit] {value}|does it [say|show|read] {value}"
            f"|is [it|this] [the number |]{value}",
            f"[数字|图里的数字|这个数字]是{value}吗|[这|图里|写的]是{value}吗|是不是{value}",
        )
        q = self.rng.choice(alternatives(q))
        return Turn(q, self._verdict(yes, self._is_value(number)), "confirm", number)

    def _confirm_larger(self) -> Turn | None:
        pair = self._pair(self.scene.shapes)
        if pair is None or not differs(*pair):
            return None
        a, b = pair
        ref_a, ref_b = self.refer(a), self.refer(b)
        if ref_a is None or ref_b is None:
            return None
        larger = self.rng.random() < 0.6
        yes = (a.size > b.size) == larger
        adjective = "[larger|bigger]" if larger else "smaller"
        zh = "[大|更大|大一些]" if larger else "[小|更小|小一些]"
        q = self.say(
            f"is {ref_a[0]} {adjective} than {ref_b[0]}",
            f"{ref_a[0]}比{ref_b[0]}{zh}吗|{ref_a[0]}是不是比{ref_b[0]}{zh}",
        )
        q = self.rng.choice(alternatives(q))
        truth = a.size > b.size
        if self.en:
            body = f"{ref_a[1]} is {'larger' if truth else 'smaller'} than {ref_b[1]}"
        else:
            body = f"{ref_a[1]}比{ref_b[1]}{'大' if truth else '小'}"
        return Turn(q, self._verdict(yes, body), "confirm", a)
