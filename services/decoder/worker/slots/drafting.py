"""Drafts that the decoder puts into rows by itself: it alone knows a sequence's newest token when its next row runs."""

import numpy as np

from services.decoder.speculation.proposer import Proposer
from services.decoder.worker.plans.drafts import put_into
from services.decoder.worker.plans.plan import Plan
from services.decoder.worker.slots.kept_by_slot import Introduced, KeptBySlot
from services.decoder.worker.slots.slots import PENDING, SlotTable

Pairs = np.ndarray[tuple[int, int], np.dtype[np.int32]]

_NO_SCOPE = b""


class Drafting(KeptBySlot):
    """Completes plans that leave to the decoder where rows start and what is drafted in them."""

    def __init__(self, slots: SlotTable, proposer: Proposer | None, most: int) -> None:
        """most: drafts of a row, for `Hello.max_drafts`. Without a proposer there are none."""
        self._slots, self._proposer = slots, proposer
        self.most = 0 if proposer is None else most
        self._limits: dict[int, int] = {}  # of tokens of a sequence
        self._stops: dict[int, frozenset[int]] = {}
        self._scopes: dict[int, bytes] = {}

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`."""
        if self._proposer is None:
            return
        message = sequence.message
        self._limits[slot] = message.prompt_len + message.sampling.max_tokens
        self._stops[slot] = frozenset(message.sampling.stop_token_ids)
        self._begin(slot, message.root_name)

    def fork(self, child: int, parent: int, choice: int) -> None:
        """See `KeptBySlot.fork`."""
        if self._proposer is not None and parent in self._limits:
            self._limits[child], self._stops[child] = self._limits[parent], self._stops[parent]
            self._begin(child, self._scopes.get(parent, _NO_SCOPE))

    def drop(self, slot: int) -> None:
        """See `KeptBySlot.drop`."""
        if self._proposer is None or self._limits.pop(slot, None) is None:
            return
        del self._stops[slot], self._scopes[slot]
        slots = self._slots
        answer = slots.tokens[slot, slots.prompt_len[slot] : slots.length[slot]]
        self._proposer.end(slot, answer[answer != PENDING])

    def complete(self, plan: Plan) -> None:
        """Says where rows start that may start later than planned, and puts drafts into those that may have some: the
        plan's own `proposed` where it has them, else the proposer's. Called before the plan is applied, when the tokens
        of its rows with drafts are known."""
        if not len(plan.row_drafts):
            return
        here = self._slots.computed[plan.row_slot]
        late = here - plan.row_start
        moved = (late > 0) & (late <= plan.row_slack)
        plan.row_start = np.where(moved, here, plan.row_start)
        if plan.proposed is None:
            plan.proposed = self._propose(plan)
        if len(plan.proposed):
            put_into(plan, plan.proposed[:, 0], plan.proposed[:, 1])

    def _begin(self, slot: int, scope: bytes) -> None:
        assert self._proposer is not None
        self._scopes[slot] = scope
        self._proposer.begin(slot, scope)

    def _propose(self, plan: Plan) -> Pairs:
        """Rows of the plan and the drafts of each, in their order."""
        found: list[tuple[int, int]] = []
        for row in np.flatnonzero(plan.row_drafts).tolist():
            slot, most = int(plan.row_slot[row]), int(plan.row_drafts[row])
            found += [
                (row, token) for token in self._drafts_of(slot, int(plan.row_start[row]), most)
            ]
        return np.array(found, np.int32).reshape(-1, 2)

    def _drafts_of(self, slot: int, start: int, most: int) -> list[int]:
        slots = self._slots
        length = int(slots.length[slot])
        # Otherwise the row is refused, or its sequence is over.
        if slot not in self._limits or length != start + 1 or slots.failed[slot]:
            return []
        tokens = slots.tokens[slot, :length]
        most = min(most, self._limits[slot] - length - 1)
        if most <= 0 or int(tokens[-1]) in self._stops[slot] or self._proposer is None:
            return []
        return self._proposer.propose(slot, tokens, most)
