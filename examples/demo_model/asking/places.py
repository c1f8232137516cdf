"""Where things are, alone and to one another."""

from __future__ import annotations

from examples.demo_model import words
from examples.demo_model.asking.base import Asker, Turn, alternatives
from examples.demo_model.asking.relations import relation_of
from examples.demo_model.pictures.scenes import CELLS, SHAPES, Thing
from examples.demo_model.words import PLACE, PLACE_ASKED, RELATION


class Places(Asker):
    """Where things are."""

    def where(self, thing: Thing | None = None, it: str = "") -> Turn | None:
        if thing is None and self.rng.random() < 0.06:
            return self._where_none()
        target = thing or self.pick()
        if target is None:
            return None
        ref = self.refer(target)
        if ref is None:
            return None
        asked, answered = ref
        if it:
            asked = it
            answered = self.the(
                self.shape_name(target.shape) if target.is_number else self.both(target)
            )
            if self.unique(shape=target.shape) and not target.is_number:
                answered = self.the(self.shape_name(target.shape))
        inside = self.in_picture()
        q = self.say(
            f"where is {asked}{inside}|[where's|wheres] {asked}{inside}|where {asked} is{inside}"
            f"|[in which|in what|which|what] [part|area|corner|region] of the [picture|image] is "
            f"{asked}|[what is|what's] the [position|location] of {asked}{inside}"
            f"|where can [i|you|we] [find|see] {asked}{inside}|where do you see {asked}"
            f"|where is {asked} [located|placed|positioned]{inside}|locate {asked}|find {asked}",
            f"{asked}在[哪里|哪儿|哪|哪个位置|什么位置|什么地方|图的哪里|图片的什么位置|图中哪里]"
            f"|{asked}的位置[|是什么|在哪里|在哪]|{asked}位于[哪里|什么位置|图的哪个位置]"
            f"|[哪里|哪儿]有{asked}|{asked}在图片的哪[个部分|个位置|一边|里]",
        )
        q = self.rng.choice(alternatives(q))
        return Turn(q, self.sentence(self._is_at(answered, target)), "where", target)

    def _where_none(self) -> Turn | None:
        shape = self.rng.choice((*SHAPES, "number"))
        if self.matching(shape):
            return None
        asked, name = self.shape_name(shape, True), self.shape_name(shape)
        q = self.say(f"[where is|where's] the {asked}", f"{asked}在[哪里|哪儿|什么位置]")
        body = f"there is no {name} in the picture" if self.en else f"图中没有{name}"
        return Turn(q, self.sentence(body), "where")

    def at(self) -> Turn | None:
        """What is in a certain place."""
        cell = self.rng.choice(CELLS)
        if self.rng.random() < 0.8 and self.scene.things:
            cell = self.rng.choice(self.scene.things).cell
        if cell in ("left", "right"):
            pool = [t for t in self.scene.things if t.cell.endswith(cell)]
        elif cell in ("top", "bottom"):
            pool = [t for t in self.scene.things if t.cell.startswith(cell)]
        else:
            pool = [t for t in self.scene.things if t.cell == cell]
        if len(pool) > 1 or (pool and pool[0].cell != cell and self.rng.random() < 0.5):
            return None
        asked = words.say(PLACE_ASKED[self.language][cell], self.rng)
        place = PLACE[self.language][cell]
        q = self.say(
            f"[what is|what's|what do you see|what can you see|what is there|what shape is|"
            f"which shape is|what lies|tell me what is] {asked}"
            f"[| of the picture| of the image|{self.in_picture()}]",
            f"{self.pic()}{asked}[有什么|是什么|的是什么|有什么[形状|东西|图形]|是什么[形状|图形]]",
        )
        if not pool:
            body = f"there is nothing {place}" if self.en else f"{place}什么都没有"
            return Turn(q, self.sentence(body), "at")
        thing = pool[0]
        if self.en:
            name = (
                f"the number {thing.value}" if thing.is_number else words.article(self.both(thing))
            )
            body = f"there is {name} {place}"
        else:
            name = f"数字{thing.value}" if thing.is_number else f"一个{self.both(thing)}"
            body = f"{place}有{name}"
        return Turn(q, self.sentence(body), "at", thing)

    def relate(self) -> Turn | None:
        """How one thing lies to another."""
        pair = self._pair(self.scene.things)
        if pair is None:
            return None
        a, b = pair
        ref_a, ref_b = self.refer(a), self.refer(b)
        relation = relation_of(a, b)
        if ref_a is None or ref_b is None or relation is None:
            return None
        q = self.say(
            f"where is {ref_a[0]} [relative to|compared to|with respect to|in relation to|"
            f"as seen from|from] {ref_b[0]}|[what is|what's] the position of {ref_a[0]} relative to "
            f"{ref_b[0]}|[on|] [which|what] side of {ref_b[0]} is {ref_a[0]}[ on|]"
            f"|how is {ref_a[0]} positioned relative to {ref_b[0]}"
            f"|in [which|what] direction from {ref_b[0]} is {ref_a[0]}"
            f"|relative to {ref_b[0]}, where is {ref_a[0]}",
            f"{ref_a[0]}在{ref_b[0]}的[哪边|哪里|哪个方向|什么方向|什么位置|哪一边|哪个位置|哪一侧]"
            f"|相对于{ref_b[0]}，{ref_a[0]}在[哪里|什么位置|哪边]"
            f"|{ref_a[0]}相对[于|]{ref_b[0]}[在哪里|的位置|的位置是什么|在什么位置]"
            f"|{ref_a[0]}位于{ref_b[0]}的[哪边|哪个方向|什么方向|哪里]",
        )
        q = self.rng.choice(alternatives(q)).strip()
        place = RELATION[self.language][relation]
        body = (
            f"{ref_a[1]} is {place} {ref_b[1]}" if self.en else f"{ref_a[1]}在{ref_b[1]}的{place}"
        )
        return Turn(q, self.sentence(body), "relate", a)
