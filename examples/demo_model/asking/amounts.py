"""How many, whether any, and which is larger."""

from __future__ import annotations

from examples.demo_model import words
from examples.demo_model.asking.base import Asker, Turn, alternatives
from examples.demo_model.asking.relations import differs
from examples.demo_model.pictures.palette import COLOURS
from examples.demo_model.pictures.scenes import SHAPES


class Amounts(Asker):
    """How many and how large."""

    def count(self, elliptic: bool = False) -> Turn | None:
        roll, rng = self.rng.random(), self.rng
        shape = colour = None
        if roll >= 0.3 or elliptic:
            here = rng.random() < 0.78
            shapes = [t.shape for t in self.scene.shapes] if here else list(SHAPES)
            colours = [t.colour for t in self.scene.shapes] if here else list(COLOURS)
            if not shapes:
                return None
            if roll < 0.64 or elliptic:
                shape = rng.choice(shapes)
            elif roll < 0.92:
                colour = rng.choice(colours)
                number = self.scene.number
                if number is not None and number.colour == colour:
                    return None
            else:
                shape, colour = rng.choice(shapes), rng.choice(colours)
        n = len(self.matching(shape, colour))
        q = self._count_question(shape, colour, elliptic)
        return Turn(
            q,
            self.sentence(self.count_body(n, shape, colour)),
            "count",
            counted=None if colour else shape,
        )

    def _count_question(self, shape: str | None, colour: str | None, elliptic: bool) -> str:
        if self.en:
            noun = (
                self.shape_name(shape, True, many=True)
                if shape
                else self.say("[shapes|shapes|objects|things|figures]", "")
            )
            if colour:
                noun = f"{self.colour_name(colour, True)} {noun}"
            if elliptic:
                return self.say(f"[and |]how many {noun}|and {noun}|what about {noun}", "").split(
                    "|"
                )[self.rng.randrange(3)]
            inside = self.in_picture()
            q = (
                f"how many {noun} [are there|do you see|can you see|are|are shown|are visible|"
                f"does it show|does the picture show]{inside}|count the {noun}{inside}"
                f"|[what is|what's] the number of {noun}{inside}|how many {noun}{inside}"
                f"|how many {noun} are in the [picture|image]|how many {noun} there are{inside}"
                f"|give me the [count|number] of {noun}{inside}"
            )
            if not shape and not colour:
                q += "|how many shapes in total|how many shapes are there [in total|altogether]"
            return self.say(self.rng.choice(alternatives(q)), "")
        noun = self.shape_name(shape, True) if shape else self.say("", "[形状|图形|图形|东西|物体]")
        if colour:
            noun = f"{self.colour_name(colour, True)}[的|]{noun}"
        if elliptic:
            return self.say("", f"[那|]{noun}[有几个|呢|有多少个]")
        pic = self.pic()
        q = (
            f"{pic}[有|一共有|总共有|共有|][几个|多少个|多少]{noun}|{noun}有[几个|多少个|多少]"
            f"|{pic}{noun}[的数量|的个数][是多少|]|数一数{pic}[有几个|有多少|的]{noun}"
        )
        return self.say("", self.rng.choice(alternatives(q)))

    def exists(self, elliptic: bool = False) -> Turn | None:
        yes = self.rng.random() < 0.5
        picked = self._pick_wanted(yes)
        if picked is None:
            return None
        shape, colour = picked
        if shape == "number" and self.rng.random() < 0.3:  # balance: fewer pictures have one
            yes = self.scene.number is not None
        found = self.matching(shape, colour)
        if bool(found) != yes:
            return None
        if colour and not shape and not found and self.matching(None, colour, with_number=True):
            return None  # a number of this colour: is that "anything red"?
        q = self._exists_question(shape, colour, elliptic)
        name = self.shape_name(shape) if shape else self.say("shape", "形状")
        if self.en:
            noun = f"{self.colour_name(colour)} {name}" if colour else name
            body = f"Yes, there is {words.article(noun)}." if yes else f"No, there is no {noun}."
        else:
            noun = f"{self.colour_name(colour)}的{name}" if colour else name
            body = f"有，图中有{noun}。" if yes else f"没有，图中没有{noun}。"
        return Turn(q, body, "exists", found[0] if len(found) == 1 else None)

    def _pick_wanted(self, yes: bool) -> tuple[str | None, str | None] | None:
        """A shape, a colour or both to ask for; with `yes` something that is there."""
        rng, shapes = self.rng, self.scene.shapes
        form = rng.choices(("shape", "colour", "both", "number"), (0.36, 0.2, 0.36, 0.08))[0]
        if form == "number":
            return "number", None
        if form == "shape":
            return rng.choice([t.shape for t in shapes] if yes and shapes else SHAPES), None
        if form == "colour":
            return None, rng.choice([t.colour for t in shapes] if yes and shapes else COLOURS)
        base = self.pick(shapes)
        if base is None:
            return None
        if yes:
            return base.shape, base.colour
        roll = rng.random()  # near misses mostly: one of the two is there
        if roll < 0.22:
            return base.shape, rng.choice([t.colour for t in shapes])
        if roll < 0.45:
            return base.shape, rng.choice(COLOURS)
        if roll < 0.9:
            return rng.choice(SHAPES), base.colour
        return rng.choice(SHAPES), rng.choice(COLOURS)

    def _exists_question(self, shape: str | None, colour: str | None, elliptic: bool) -> str:
        if self.en:
            name = self.shape_name(shape, True) if shape else ""
            tint = self.colour_name(colour, True) if colour else ""
            inside = self.in_picture()
            if not shape:
                singular = f"[a {tint} [shape|thing|object|one]|anything {tint}|something {tint}]"
                plural = f"{tint} [shapes|things|objects|ones]"
            else:
                full = f"{tint} {name}".strip()
                singular, plural = (
                    words.article(full),
                    (f"{tint} {self.shape_name(shape, True, many=True)}".strip()),
                )
            singular = singular.replace("[a orange", "[an orange")
            if elliptic:
                return self.say(
                    self.rng.choice(
                        (
                            f"and {singular}",
                            f"what about {singular}",
                            f"and is there {singular}",
                            f"and {plural}",
                        )
                    ),
                    "",
                )
            q = (
                f"is there {singular}{inside}|are there [any |]{plural}{inside}"
                f"|do you see {singular}{inside}|can you see {singular}{inside}"
                f"|does the [picture|image] [contain|have|show] {singular}"
                f"|is {singular} [visible|present|shown]{inside}|are any {plural} there"
                f"|does it [contain|have|show] {singular}|any {plural}{inside}"
                f"|is there any {tint} {name or 'shape'}{inside}"
                f"|do you see any {plural}{inside}|has it got {singular}"
            )
            return self.say(self.rng.choice(alternatives(q)), "").replace("  ", " ")
        noun = (self.colour_name(colour, True) + self.say("", "[的|]") if colour else "") + (
            self.shape_name(shape, True) if shape else self.say("", "[形状|图形|东西|物体]")
        )
        if elliptic:
            return self.say("", f"那{noun}呢|有{noun}吗|那有{noun}吗").split("|")[
                self.rng.randrange(3)
            ]
        pic = self.pic()
        q = (
            f"{pic}有{noun}吗|{pic}有没有{noun}|{pic}[存在|能看到|可以看到]{noun}吗"
            f"|你[看到|看见]{noun}了吗|{pic}是否有{noun}|{pic}[里面|]有没有[一个|]{noun}"
            f"|{pic}有[一个|]{noun}吗|能看到{noun}吗|{pic}[包含|出现]{noun}吗"
        )
        return self.say("", self.rng.choice(alternatives(q)))

    def size(self) -> Turn | None:
        shapes = self.scene.shapes
        if len(shapes) < 2:
            return None
        if self.rng.random() < 0.5:
            return self._size_pair()
        ordered = sorted(shapes, key=lambda t: t.size)
        largest = self.rng.random() < 0.6
        thing, other = (ordered[-1], ordered[-2]) if largest else (ordered[0], ordered[1])
        if not differs(thing, other):
            return None
        answered = self.the(self.both(thing))
        adjective = "[largest|biggest]" if largest else "[smallest|tiniest]"
        if len(shapes) == 2:
            adjective = "[largest|biggest|larger|bigger]" if largest else "[smallest|smaller]"
        zh = "[最大|最大]" if largest else "[最小|最小]"
        q = self.say(
            f"[which|what] [shape|object|thing|one|figure] is [the |]{adjective}{self.in_picture()}"
            f"|[what is|what's|which is] the {adjective} [shape|object|thing|one|figure]"
            f"{self.in_picture()}|[which is|what is] the {adjective}"
            f"|name the {adjective} [shape|object|figure]|which of the shapes is the {adjective}",
            f"{self.pic()}[哪个|哪个[形状|图形|东西]|什么|什么[形状|图形]]{zh}"
            f"|{zh}的[是哪个|是什么|形状是什么|形状是哪个|图形是什么|那个是什么|是哪个形状]"
            f"|{self.pic()}{zh}的[形状|图形][是什么|是哪个|]",
        )
        q = self.rng.choice(alternatives(q))
        word = "largest" if largest else "smallest"
        body = (
            f"{answered} is the {word}"
            if self.en
            else (f"最{'大' if largest else '小'}的是{answered}")
        )
        return Turn(q, self.sentence(body), "size", thing)

    def _size_pair(self) -> Turn | None:
        pair = self._pair(self.scene.shapes)
        if pair is None or not differs(*pair):
            return None
        a, b = pair
        ref_a, ref_b = self.refer(a), self.refer(b)
        if ref_a is None or ref_b is None:
            return None
        larger = self.rng.random() < 0.6
        winner = ref_a if (a.size > b.size) == larger else ref_b
        adjective = "[larger|bigger]" if larger else "smaller"
        zh = "[更大|大|比较大|大一些|大一点]" if larger else "[更小|小|比较小|小一些|小一点]"
        q = self.say(
            f"[which|what] [is|one is|shape is] {adjective}[,|:|] {ref_a[0]} or {ref_b[0]}"
            f"|is {ref_a[0]} or {ref_b[0]} {adjective}|which of {ref_a[0]} and {ref_b[0]} is "
            f"{adjective}|{ref_a[0]} or {ref_b[0]}, which [one |]is {adjective}"
            f"|between {ref_a[0]} and {ref_b[0]}, which [one |]is {adjective}",
            f"{ref_a[0]}[和|跟|与]{ref_b[0]}[哪个|谁|，哪个|相比哪个|比，哪个]{zh}"
            f"|[哪个|谁]{zh}[，|：|]{ref_a[0]}还是{ref_b[0]}|{ref_a[0]}和{ref_b[0]}[中|之间]哪个{zh}"
            f"|是{ref_a[0]}{zh}还是{ref_b[0]}{zh}",
        )
        q = self.rng.choice(alternatives(q))
        word = "larger" if larger else "smaller"
        body = f"{winner[1]} is {word}" if self.en else f"{winner[1]}更{'大' if larger else '小'}"
        return Turn(q, self.sentence(body), "size", a if winner is ref_a else b)
