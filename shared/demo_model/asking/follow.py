"""What is only understood after the question before."""

from __future__ import annotations

from shared.demo_model import words
from shared.demo_model.asking.amounts import Amounts
from shared.demo_model.asking.base import Turn, alternatives
from shared.demo_model.asking.places import Places
from shared.demo_model.asking.things import Things
from shared.demo_model.asking.yes_no import YesNo


class Questions(Things, Places, Amounts, YesNo):
    """All kinds, and those that follow."""

    def follow(self, before: Turn) -> Turn | None:
        """A question that is only understood after `before`."""
        thing, rng = before.focus, self.rng
        it = self.say("it", "[它|它|那个|这个]")
        turn: Turn | None = None
        roll = rng.random()
        if thing is not None and roll < 0.8:
            if roll < 0.27 and before.kind != "colour":
                turn = self.colour(thing, it)
                if turn and rng.random() < 0.55:
                    turn.question = self.say(
                        "[and |]its [colour|color]|and [what|which] [colour|color]"
                        "|[what|which] [colour|color]|and the [colour|color]"
                        "|what about its [colour|color]",
                        "[那|]颜色呢|[它|那它]的颜色呢|什么颜色[的|]|它的颜色[是什么|]")
            elif roll < 0.58 and before.kind not in ("where", "describe"):
                turn = self.where(thing, it)
                if turn and rng.random() < 0.4:
                    turn.question = self.say(
                        "[and |]where|[and |]its [position|location]|and where is it"
                        "|whereabouts|and where exactly",
                        "[那|]在哪[里|儿|]|位置呢|在什么位置|[它的|]位置在哪[里|]|那它在哪[里|儿]")
            elif roll < 0.68 and before.kind not in ("shape",) and not thing.is_number:
                turn = self.shape(thing, it)
            elif before.kind != "colour":
                turn = self._confirm_colour(thing, it)
        elif before.kind in ("colour", "where"):
            other = self.pick([t for t in self.scene.things if t is not thing])
            turn = (self.colour(other) if before.kind == "colour" else self.where(other)
                    ) if other else None
            ref = self.refer(other, hide="colour") if other else None
            if turn and ref:
                turn.question = self.say(f"[and|what about|how about|and what about] {ref[0]}",
                                         f"[那|]{ref[0]}呢")
                turn.answer = (self.sentence(self._is_colour(ref[1], other.colour))
                               if before.kind == "colour" and other
                               else self.sentence(self._is_at(ref[1], other)) if other else "")
            else:
                turn = None
        elif before.kind == "count":
            turn = self.count(elliptic=True)
        elif before.kind == "exists":
            turn = self.exists(elliptic=True)
        if turn is None:
            return None
        turn.question = rng.choice(alternatives(turn.question))
        turn.question = words.say(turn.question, rng)
        turn.kind = "follow"
        return turn
