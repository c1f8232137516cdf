"""How much to take from the queue: late and little, so that the queue's order holds and other schedulers get theirs."""

from collections.abc import Iterable

from services.scheduler.decoders.link import DecoderLink
from shared.queue import Places, TakenRequest
from shared.queue.messages import cost_of

# Of work that waits at a decoder. While streams generate, prompts have about half of its time.
_START_WITHIN_S = 0.5
_READY_TO_START = 16  # requests that wait at a decoder for nothing but slots, blocks or step budget
_NO_LIMIT = 1 << 40
_KEEP = 0.8  # of the estimate of a request's cost, at each new one


class Intake:
    """How many requests the decoders could start.

    Those that wait for embeddings do not count as waiting, so that requests with images do not hold back text.
    """

    def __init__(self, links: dict[str, DecoderLink]) -> None:
        self._links = links
        self._cost_of_prompt_token = 1.0  # the queue counts the tokens of the answers as well
        self.more_wait = True  # whether the queue may hold more than was taken last

    @property
    def has_places(self) -> bool:
        """Whether something can be taken now."""
        return any(map(_capacity, self._links.values()))

    def places(self) -> list[Places]:
        """What can be taken now for each content of decoders: requests, and tokens, as the queue counts them, that they
        could begin with in time. That of the decoder that was bound last comes first.
        """
        requests: dict[str, int] = {}
        tokens: dict[str, float] = {}
        for link in reversed(self._links.values()):
            if capacity := _capacity(link):
                content = link.content
                requests[content] = requests.get(content, 0) + capacity
                tokens[content] = tokens.get(content, 0.0) + _tokens_in_time(link)
        self.more_wait = self.more_wait or not requests
        return [
            Places(content, count, self._as_the_queue_counts(tokens[content]))
            for content, count in requests.items()
        ]

    def _as_the_queue_counts(self, tokens: float) -> int:
        return max(1, int(min(_NO_LIMIT, tokens * self._cost_of_prompt_token)))

    def note(self, taken: Iterable[TakenRequest]) -> None:
        """Learns from what the queue gave: `taken` is empty where the queue is."""
        self.more_wait = False
        for one in taken:
            self.more_wait = True
            cost = cost_of(one.spec) / max(1, len(one.spec.prompt) // 4)
            kept = self._cost_of_prompt_token
            self._cost_of_prompt_token = _KEEP * kept + (1 - _KEEP) * cost


def _tokens_in_time(link: DecoderLink) -> float:
    second = link.seconds_for_token
    if not second:  # nothing is known of it yet
        return _NO_LIMIT
    return _START_WITHIN_S / second - link.core.state.num_waiting_tokens


def _capacity(link: DecoderLink) -> int:
    if link.draining:
        return 0
    state = link.core.state
    capacity = min(len(state.slots.free), _READY_TO_START) - state.num_ready_to_start
    if capacity <= 0:
        return 0
    waits_s = state.num_waiting_tokens * link.seconds_for_token
    return capacity if waits_s < _START_WITHIN_S else 0
