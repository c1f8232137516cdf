"""What prompts get of a step: all of it, or, while somebody reads along, what the others do not notice."""

from math import sqrt

from services.scheduler.core.costs import Costs
from services.scheduler.core.plan import StepPlan
from services.scheduler.core.state import Capacity

# Of a step's tokens this share stays empty while somebody reads along: a prompt that is computed alone may be a little
# longer without a second step for its last few tokens.
_READERS_SHARE = 17


class StepBudget:
    """Of one plan, while it is filled: rows that generate first, then chunks of prompts.

    A step is bounded in tokens and, once `others_read` was called, in time: by `target` microseconds as the costs
    predict them; 0 is no bound. Whatever the target, prompts get a block's worth of tokens in each step: they never
    stand still.
    """

    def __init__(self, plan: StepPlan, capacity: Capacity, costs: Costs, target: float) -> None:
        self._plan = plan
        self._capacity = capacity
        self._costs = costs
        self._target = target
        self._read = 0  # tokens of those who generate

    @property
    def whole(self) -> int:
        """Tokens that the decoder could still take in this step."""
        return self._capacity.max_batched_tokens - self._plan.num_tokens

    def others_read(self) -> None:
        """The rows that are there generate: what is added from now on must not hold them up."""
        self._plan.is_read = True
        self._read = self._plan.num_tokens

    def at(self, start: int) -> int:
        """Tokens that a chunk may have whose first token has so many before it."""
        if not self._plan.is_read:
            return self.whole
        tokens = self.whole - self._capacity.max_batched_tokens // _READERS_SHARE
        if not self._target or not self._costs.of_token:
            return tokens
        block = self._capacity.block_size
        in_time = self._in_time(start) // block * block
        given = self._plan.num_tokens - self._read
        return min(tokens, max(in_time, block - given))

    def _in_time(self, start: int) -> int:
        """The most tokens whose time is what is left: token k of them looks at `start + k` tokens."""
        costs, plan = self._costs, self._plan
        left = self._target - costs.predict(plan.num_tokens, plan.num_pairs)
        if left <= 0:
            return 0
        first = costs.of_token + costs.of_pair * start
        return int(2 * left / (first + sqrt(first * first + 2 * costs.of_pair * left)))
