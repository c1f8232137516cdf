"""How much to take from the queue: taking is late, so that the queue's order holds and others get their share."""

from collections.abc import Iterable, Mapping

from services.scheduler.decoders.link import DecoderLink
from shared.queue import TakenRequest

_START_WITHIN_S = 2.0  # of work that waits at a decoder
_READY_TO_START = 16  # requests that wait at a decoder for nothing but room
_NO_LIMIT = 1 << 40
_KEEP = 0.8  # of the estimate of a request's cost, at each new one


class Intake:
    """Knows the room at all decoders. Requests that wait for embeddings take none: text is not kept out by images."""

    def __init__(self, links: Mapping[str, DecoderLink]) -> None:
        self._links = links
        self._cost_of_prompt_token = 1.0  # the queue counts the tokens of the answer as well
        self.more_wait = True  # the last look at the queue did not see its end

    def room(self) -> int:
        """How many requests can be taken now."""
        room = sum(_room(link) for link in self._links.values())
        self.more_wait = self.more_wait or not room
        return room

    def room_tokens(self) -> int:
        """Tokens, as the queue counts them, that the decoders could begin with in time. The first request that is taken
        may have more."""
        total = 0.0
        for link in self._links.values():
            if _room(link):
                second = link.seconds_for_token
                if not second:  # nothing is known of it yet
                    return _NO_LIMIT
                total += _START_WITHIN_S / second - link.core.state.num_waiting_tokens
        return max(1, min(_NO_LIMIT, int(total * self._cost_of_prompt_token)))

    def note(self, taken: Iterable[TakenRequest]) -> None:
        """This is what the queue gave; nothing where it is empty."""
        self.more_wait = False
        for one in taken:
            self.more_wait = True
            sampling, prompt = one.spec.sampling, max(1, len(one.spec.prompt) // 4)
            cost = 1 + sampling.max_tokens * max(1, sampling.n) / prompt
            kept = self._cost_of_prompt_token
            self._cost_of_prompt_token = _KEEP * kept + (1 - _KEEP) * cost


def _room(link: DecoderLink) -> int:
    if link.draining:
        return 0
    state = link.core.state
    room = min(len(state.free_slots), _READY_TO_START) - state.num_ready_to_start
    if room <= 0:
        return 0
    waits_s = state.num_waiting_tokens * link.seconds_for_token
    return room if waits_s < _START_WITHIN_S else 0
