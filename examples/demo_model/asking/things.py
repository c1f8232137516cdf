"""What is there, of which colour and shape, and which number."""

from __future__ import annotations

from examples.demo_model import words
from examples.demo_model.asking.base import Asker, Turn, alternatives
from examples.demo_model.pictures.scenes import SHAPES, Thing
from examples.demo_model.words import PLACE


class Things(Asker):
    """What things are."""

    def what(self) -> Turn | None:
        if self.en:
            inside = self.in_picture()
            q = self.say(
                "[what is|what's|whats] [there|shown|visible|]"
                + inside
                + "|[what can you see|what do you see|what does it show|what are the objects|"
                "list [the|all] [shapes|objects|things]|name the [shapes|objects|things]|"
                "which [shapes|objects|things] [are there|do you see|can you see]|"
                "what shapes [are there|do you see|can you see|are visible]|"
                "what [things|objects] are|what is drawn|what's drawn]" + inside,
                "",
            )
            q = self.rng.choice(alternatives(q))
            q = self.say(q, "")
        else:
            q = self.pic() + self.say(
                "",
                "[有什么|有些什么|有哪些[东西|形状|图形|物体]|都有什么|"
                "你看到了什么|能看到什么|画了什么|是什么|里面有什么|"
                "看到什么|有什么[东西|形状|图形]|显示了什么]",
            )
        return Turn(q, self._what_answer(), "what", self._only())

    def _what_answer(self) -> str:
        if not self.scene.things:
            return self.sentence("there is nothing in the picture" if self.en else "图中什么都没有")
        return self._inventory()

    def _inventory(self) -> str:
        """Each thing with its place, from left to right: with its place each is mentioned exactly once."""
        ordered = sorted(self.scene.things, key=lambda t: (t.is_number, t.x))
        parts = []
        for t in ordered:
            place = PLACE[self.language][t.cell]
            if self.en:
                name = f"the number {t.value}" if t.is_number else words.article(self.both(t))
                parts.append(f"{name} {place}")
            else:
                name = f"数字{t.value}" if t.is_number else f"一个{self.both(t)}"
                parts.append(f"{place}有{name}")
        listed = words.join(parts, "en") if self.en else "，".join(parts)
        return self.sentence(f"the picture shows {listed}" if self.en else f"图片{listed}")

    def describe(self) -> Turn | None:
        if not self.scene.things:
            return None
        q = self.say(
            "[describe|please describe|can you describe|could you describe|"
            "give me a [short |]description of|tell me about|explain] "
            "[the picture|this picture|the image|this image|it|the photo|what you see|the scene]"
            "[| briefly| in one sentence| in detail| in a few words]",
            "[描述|请描述|描述一下|请描述一下|介绍一下|说说|说明一下|形容一下|简单描述]"
            "[这张图片|这张图|图片|图片内容|这幅图|画面|图中的内容|你看到的]",
        )
        return Turn(q, self._inventory(), "describe", self._only())

    def colour(self, thing: Thing | None = None, it: str = "") -> Turn | None:
        if thing is None and self.rng.random() < 0.14:
            return self._colour_many_or_none()
        target = thing or self.pick()
        if target is None:
            return None
        ref = self.refer(target, hide="colour")
        if ref is None:
            return None
        asked, answered = ref
        asked = it or asked
        q = self.say(
            f"[what|which] [colour|color] [is|does] {asked}"
            f"|[what is|what's] the [colour|color] of {asked}"
            f"|[what|which] [colour|color] {asked} is"
            f"|[what|which] [colour|color] [would you say is|has] {asked}"
            f"|{asked} is [what|which] [colour|color]",
            f"{asked}[是|是|的颜色是|是啥|]什么颜色[的|]|{asked}的颜色[|是什么|呢]|"
            f"{asked}[是哪种颜色|什么色|是什么颜色的]",
        )
        q = self.rng.choice(alternatives(q))
        if q.startswith(
            ("what colour does", "what color does", "which colour does", "which color does")
        ):
            q += " have"
        elif " has " in q:
            q = q.replace(" has ", " does ") + " have"
        return Turn(q, self.sentence(self._is_colour(answered, target.colour)), "colour", target)

    def _colour_many_or_none(self) -> Turn | None:
        shape = self.rng.choice(SHAPES)
        found = self.matching(shape)
        if len(found) == 1:
            return None
        name, asked = self.shape_name(shape), self.shape_name(shape, True)
        if not found:
            q = self.say(
                f"what [colour|color] is the {asked}", f"{asked}[是|的颜色是]什么颜色[的|]"
            )
            body = f"there is no {name} in the picture" if self.en else f"图中没有{name}"
            return Turn(q, self.sentence(body), "colour")
        many = words.plural(asked) if self.en else asked
        q = self.say(
            f"what [colours|colors|colour|color] are the {many}",
            f"[这些|]{many}[分别|都|]是什么颜色[的|]",
        )
        colours = list(dict.fromkeys(t.colour for t in sorted(found, key=lambda t: t.x)))
        listed = words.join([self.colour_name(c) for c in colours], self.language)
        body = f"the {words.plural(name)} are {listed}" if self.en else f"{name}是{listed}的"
        return Turn(q, self.sentence(body), "colour")

    def colours(self) -> Turn | None:
        if not self.scene.shapes or self.scene.number:
            return None
        ordered = sorted(self.scene.shapes, key=lambda t: t.x)
        found = list(dict.fromkeys(t.colour for t in ordered))
        q = self.say(
            "[what|which] [colours|colors] [are there|do you see|are the shapes|are used|"
            "can you see]" + self.in_picture(),
            self.pic() + "[有哪些颜色|有什么颜色|都有什么颜色|形状都是什么颜色]",
        )
        listed = words.join([self.colour_name(c) for c in found], self.language)
        verb = "colours are" if len(found) > 1 else "colour is"
        return Turn(
            q, self.sentence(f"the {verb} {listed}" if self.en else f"颜色有{listed}"), "colour"
        )

    def shape(self, thing: Thing | None = None, it: str = "") -> Turn | None:
        target = thing or self.pick(self.scene.shapes)
        if target is None or target.is_number:
            return None
        if it:
            self.the(self.shape_name(target.shape))
            q = self.say(
                f"[what|which] shape is {it}|[what is|what's] its shape|what is {it}"
                f"|what kind of shape is {it}",
                f"{it}是什么[形状|图形][的|]|形状[呢|是什么]",
            )
            q = self.rng.choice(alternatives(q))
        else:
            if not self.unique(colour=target.colour):
                return None
            colour = self.colour_name(target.colour, True)
            q = self.say(
                f"[what|which] shape is {colour}|what is {colour}|which [one|object|thing] is "
                f"{colour}|what [kind of |]shape is the {colour} [one|thing|object|figure]"
                f"|what is the {colour} [shape|thing|one|object|figure]"
                f"|[what is|what's] the shape of the {colour} [one|thing|object]"
                f"|[what|which] shape does the {colour} [one|thing|object] have",
                f"{colour}的[形状|东西|图形|那个|物体|]是什么[形状|图形|]"
                f"|[什么|哪个|哪种][形状|图形]是{colour}[的|]|[哪个|什么]是{colour}的"
                f"|{colour}的是[什么|什么形状|哪个]|什么东西是{colour}的",
            )
            q = self.rng.choice(alternatives(q))
        name, colour = self.shape_name(target.shape), self.colour_name(target.colour)
        body = (
            f"the {colour} shape is {words.article(name)}" if self.en else f"{colour}的形状是{name}"
        )
        return Turn(q, self.sentence(body), "shape", target)

    def number(self) -> Turn | None:
        found = self.scene.number
        if found is None and self.rng.random() < 0.75:
            return None
        inside = self.in_picture()
        q = self.say(
            f"[what|which] number [is|do you see|can you see|is printed|is shown|is written|"
            f"is there|is displayed|does it show|is it|appears]{inside}"
            f"|[what is|what's|whats] the number{inside}|read the [number|digits|text]{inside}"
            f"|what does [it|the picture|the image|the number|the text] [say|read|show]"
            f"|[what|which] digits [are there|do you see|are printed|are shown]{inside}"
            f"|[what is|what's] [written|printed]{inside}|tell me the number{inside}"
            f"|[what is|what's] the [printed|written] number|what number{inside}"
            f"|[what is|what's] the value of the number",
            f"{self.pic()}[的数字是什么|的数字是多少|数字是几|写的是什么数字|有什么数字|是什么数字|"
            f"印的数字是多少|写着什么数字|显示的数字是多少|的数字|数字是多少|写了什么数字|印着什么数字]"
            f"|[读出|读一下|告诉我]{self.pic()}[的|]数字|[这|上面]是[多少|几|什么数字]"
            f"|上面写[的是|着|了][什么|多少|什么数字]|数字是[几|多少|什么]",
        )
        q = self.rng.choice(alternatives(q))
        if found is None:
            if not any(w in q for w in ("number", "digit", "数字")):
                return None
            body = "there is no number in the picture" if self.en else "图中没有数字"
            return Turn(q, self.sentence(body), "number")
        return Turn(q, self.sentence(self._is_value(found)), "number", found)

    def ground(self) -> Turn | None:
        name = self.scene.ground_name
        if name is None:
            return None
        colour = self.colour_name(name)
        q = self.say(
            "[what|which] [colour|color] is the [background|ground|backdrop]"
            "|[what is|what's] the [colour|color] of the background"
            "|[what is|what's] the background [colour|color]",
            f"[背景|底色|背景色|{self.pic()}的背景]是什么[颜色|颜色的]|背景[的|]颜色[是什么|]"
            f"|背景是什么色",
        )
        q = self.rng.choice(alternatives(q))
        body = f"the background is {colour}" if self.en else f"背景是{colour}的"
        return Turn(q, self.sentence(body), "ground")
