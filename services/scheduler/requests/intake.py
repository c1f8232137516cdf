"""How much to take from the queue: late and little, so that the queue's order holds and other schedulers get theirs."""

from collections.abc import Iterable, Mapping

from services.scheduler.decoders.link import DecoderLink
from shared.queue import TakenRequest
from shared.queue.messages import cost_of

_START_WITHIN_S = 2.0  # of work that waits at a decoder
_READY_TO_START = 16  # requests that wait at a decoder for nothing but slots, blocks or step budget
_NO_LIMIT = 1 << 40
_KEEP = 0.8  # of the estimate of a request's cost, at each new one


class Intake:
    """How many requests the decoders could start.

    Those that wait for embeddings do not count as waiting, so that requests with images do not hold back text.
    """

    def __init__(self, links: Mapping[str, DecoderLink]) -> None:
        self._links = links
        self._cost_of_prompt_token = 1.0  # the queue counts the tokens of the answers as well
        self.more_wait = True  # whether the queue may hold more than was taken last

    def capacity(self) -> int:
        """How many requests can be taken now."""
        capacity = sum(_capacity(link) for link in self._links.values())
        self.more_wait = self.more_wait or not capacity
        return capacity

    def token_capacity(self) -> int:
        """Tokens, as the queue counts them, that the decoders could begin with in time; the first request that is taken
        may have more.
        """
        total = 0.0
        for link in self._links.values():
            if _capacity(link):
                second = link.seconds_for_token
                if not second:  # nothing is known of it yet
                    return _NO_LIMIT
                total += _START_WITHIN_S / second - link.core.state.num_waiting_tokens
        return max(1, min(_NO_LIMIT, int(total * self._cost_of_prompt_token)))

    def note(self, taken: Iterable[TakenRequest]) -> None:
        """Learns from what the queue gave: `taken` is empty where the queue is."""
        self.more_wait = False
        for one in taken:
            self.more_wait = True
            cost = cost_of(one.spec) / max(1, len(one.spec.prompt) // 4)
            kept = self._cost_of_prompt_token
            self._cost_of_prompt_token = _KEEP * kept + (1 - _KEEP) * cost


def _capacity(link: DecoderLink) -> int:
    if link.draining:
        return 0
    state = link.core.state
    capacity = min(len(state.free_slots), _READY_TO_START) - state.num_ready_to_start
    if capacity <= 0:
        return 0
    waits_s = state.num_waiting_tokens * link.seconds_for_token
    return capacity if waits_s < _START_WITHIN_S else 0
