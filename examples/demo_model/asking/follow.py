"""Questions that can only be understood after the one before."""

from __future__ import annotations

from examples.demo_model import words
from examples.demo_model.asking.amounts import Amounts
from examples.demo_model.asking.as_json import AsJson
from examples.demo_model.asking.base import Turn, alternatives
from examples.demo_model.asking.places import Places
from examples.demo_model.asking.things import Things
from examples.demo_model.asking.yes_no import YesNo
from examples.demo_model.pictures.scenes import Thing


class Questions(Things, Places, Amounts, YesNo, AsJson):
    """All kinds, and those that follow."""

    def follow(self, before: Turn) -> Turn | None:
        """A question that is only understood after `before`."""
        if before.focus is not None and self.rng.random() < 0.8:
            turn = self._about_it(before.focus, before.kind)
        elif before.kind in ("colour", "where"):
            turn = self._about_another(before)
        elif before.kind == "count":
            turn = self.count(elliptic=True)
        elif before.kind == "exists":
            turn = self.exists(elliptic=True)
        else:
            turn = None
        if turn is None:
            return None
        turn.question = words.say(self.rng.choice(alternatives(turn.question)), self.rng)
        turn.kind = "follow"
        return turn

    def _about_it(self, thing: Thing, known: str) -> Turn | None:
        """Another question about the thing spoken of; known: the kind of the question before."""
        it = self.say("it", "[它|它|那个|这个]")
        roll = self.rng.random()
        if roll < 0.34 and known != "colour":
            turn = self.colour(thing, it)
            if turn and self.rng.random() < 0.55:
                turn.question = self.say(
                    "[and |]its [colour|color]|and [what|which] [colour|color]"
                    "|[what|which] [colour|color]|and the [colour|color]"
                    "|what about its [colour|color]",
                    "[那|]颜色呢|[它|那它]的颜色呢|什么颜色[的|]|它的颜色[是什么|]",
                )
            return turn
        if roll < 0.72 and known not in ("where", "describe"):
            turn = self.where(thing, it)
            if turn and self.rng.random() < 0.4:
                turn.question = self.say(
                    "[and |]where|[and |]its [position|location]|and where is it"
                    "|whereabouts|and where exactly",
                    "[那|]在哪[里|儿|]|位置呢|在什么位置|[它的|]位置在哪[里|]|那它在哪[里|儿]",
                )
            return turn
        if roll < 0.85 and known != "shape" and not thing.is_number:
            return self.shape(thing, it)
        return self.confirm_colour(thing, it) if known != "colour" else None

    def _about_another(self, before: Turn) -> Turn | None:
        """The same question about another thing: "and the square?"."""
        other = self.pick([t for t in self.scene.things if t is not before.focus])
        ref = self.refer(other, hide="colour") if other else None
        if other is None or ref is None:
            return None
        question = self.say(
            f"[and|what about|how about|and what about] {ref[0]}", f"[那|]{ref[0]}呢"
        )
        body = (
            self._is_colour(ref[1], other.colour)
            if before.kind == "colour"
            else self._is_at(ref[1], other)
        )
        return Turn(question, self.sentence(body), before.kind, other)
