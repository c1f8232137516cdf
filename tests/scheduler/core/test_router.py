"""Which decoder a sequence goes to, with real cores behind the router."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import StepOutput
from services.scheduler.core.router import PrefixIndex, Router
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence

BLOCK = 4


def capacity(**changes: Any) -> Capacity:
    values: dict[str, Any] = {
        "num_blocks": 1025,
        "block_size": BLOCK,
        "max_slots": 8,
        "max_model_len": 4000,
    }
    return Capacity(**{**values, "max_batched_tokens": 64, **changes})


@dataclass(eq=False)
class Link:
    """A decoder whose steps take no time."""

    core: Scheduler = field(default_factory=lambda: Scheduler(capacity()))
    draining: bool = False
    token_s: float = 0.001
    step_s: float = 0.001
    numerics: str = ""

    def predict(self, tokens: int) -> float:
        return (self.step_s + self.token_s * tokens) if self.token_s else 0.0

    def work(self, steps: int = 1000) -> None:
        """Runs plans until there is nothing to do, or so many."""
        for _ in range(steps):
            plan = self.core.plan()
            if plan is None:
                return
            self.core.complete(StepOutput([1] * len(plan.samples)))


class Fleet:
    """Links behind a router."""

    def __init__(self, *links: Link) -> None:
        self.router: Router[Link] = Router()
        self.links = list(links)
        self.sent = 0
        for link in links:
            self.router.add(link)

    def send(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        begun_in: str | None = None,
        lora_id: str = "",
    ) -> Link:
        self.sent += 1
        name = f"r{self.sent}"
        sequence = Sequence(
            name, list(prompt), len(prompt), max_tokens, arrival=self.sent, lora_id=lora_id
        )
        link = self.router.choose(sequence, begun_in)
        assert link.core.add(sequence) is None
        return link

    def work(self, steps: int = 1000) -> None:
        for link in self.links:
            link.work(steps)


def fleet(count: int) -> Fleet:
    return Fleet(*(Link() for _ in range(count)))


def text(start: int, count: int) -> list[int]:
    return list(range(1000 * start, 1000 * start + count))


@pytest.mark.parametrize("count", [2, 8, 40])
def test_a_prefix_goes_where_it_is_cached(count: int) -> None:
    many = fleet(count)
    homes = {number: many.send(text(number, 40)) for number in range(1, count)}
    many.work()
    for number, home in homes.items():
        assert many.send(text(number, 40) + [7] * 8) is home
        many.work()


def test_a_cache_that_was_kept_over_a_new_binding_is_found() -> None:
    few = fleet(3)
    first = Sequence("a", text(1, 40), 40, 1)
    few.links[2].core.add(first)
    few.links[2].work()
    assert few.send(text(1, 40)) is few.links[2]


@pytest.mark.parametrize("count", [4, 40])
def test_a_new_prefix_that_comes_in_a_burst_stays_together(count: int) -> None:
    many = fleet(count)
    assert len({many.send(text(5, 800) + text(10 + n, 4)) for n in range(3)}) == 1


@pytest.mark.parametrize("count", [2, 40])
def test_equal_lines_are_filled_evenly(count: int) -> None:
    many = fleet(count)
    for number in range(4 * count):
        many.send(text(number, 20), max_tokens=50)
    loads = [link.core.state.num_sequences for link in many.links]
    assert max(loads) - min(loads) <= (0 if count == 2 else 5)


def test_of_equal_lines_the_one_with_fewer_running_is_taken() -> None:
    two = fleet(2)
    busy = two.send(text(1, 20), max_tokens=100)
    two.work(3)
    assert busy.core.state.num_sequences == 1
    for number in range(2, 4):
        other = two.send(text(number, 20), max_tokens=1)
        assert other is not busy
        two.work(3)


def test_a_holder_is_passed_over_when_its_line_costs_more_than_it_saves() -> None:
    two = fleet(2)
    home = two.send(text(1, 400))
    two.work()
    chosen = [two.send(text(1, 400) + text(n, 20), max_tokens=60) for n in range(10, 30)]
    assert chosen[:2] == [home, home]
    other = next(link for link in two.links if link is not home)
    # When waiting costs as much as the prefix saves, both are chosen in turn.
    assert 3 <= chosen.count(other) <= 14


def test_a_hot_prefix_spreads_over_decoders() -> None:
    many = fleet(20)
    for number in range(400):
        many.send(text(1, 40) + text(100 + number, 10), max_tokens=20)
        if number % 4 == 0:
            many.work(2)
    assert max(link.core.state.num_sequences for link in many.links) <= 40
    assert sum(bool(link.core.state.num_sequences) for link in many.links) >= 10
    many.work()
    assert all(link.core.state.num_sequences == 0 for link in many.links)


def test_a_slow_decoder_gets_less() -> None:
    slow = Link(Scheduler(capacity(max_slots=64)), token_s=0.004)
    fast = Link(Scheduler(capacity(max_slots=64)), token_s=0.001)
    both = Fleet(slow, fast)
    chosen = [both.send(text(number, 20), max_tokens=1) for number in range(20)]
    assert chosen.count(fast) > 2 * chosen.count(slow) > 0


def test_a_decoder_that_nothing_is_known_of_is_like_the_others() -> None:
    both = Fleet(Link(), Link(token_s=0.0))
    chosen = [both.send(text(number, 20)) for number in range(20)]
    assert chosen.count(both.links[0]) == 10


def test_full_decoders_are_the_last_resort() -> None:
    two = Fleet(Link(core=Scheduler(capacity(max_slots=2))), Link())
    chosen = [two.send(text(number, 8), max_tokens=90) for number in range(8)]
    assert chosen.count(two.links[0]) == 2
    small = Fleet(Link(core=Scheduler(capacity(num_blocks=11))), Link())
    chosen = [small.send(text(number, 20), max_tokens=9) for number in range(8)]
    assert chosen.count(small.links[0]) <= 4


@pytest.mark.parametrize("count", [2, 40])
def test_draining_and_gone_decoders_get_nothing(count: int) -> None:
    many = fleet(count)
    home = many.send(text(1, 40))
    many.work()
    home.draining = True
    assert many.send(text(1, 40)) is not home
    many.work()
    home.draining = False
    for link in many.links:
        if link is not home:
            link.draining = True
    assert many.send(text(1, 40)) is home
    many.work()
    for link in many.links:
        link.draining = True
    assert many.send(text(1, 40)) in many.links  # one of them must take it
    many.router.remove(home)
    many.router.remove(home)
    assert all(many.send(text(1, 40)) is not home for _ in range(5))


@pytest.mark.parametrize("count", [2, 12])  # all are looked at, or some by chance
def test_a_sequence_goes_to_a_decoder_that_holds_its_longest_output(count: int) -> None:
    short = [Link(Scheduler(capacity(max_model_len=100))) for _ in range(count - 1)]
    long = Link(Scheduler(capacity(max_model_len=200)))
    mixed = Fleet(*short, long)
    for number in range(30):
        assert mixed.send(text(number, 40), 61) is long
    assert any(mixed.send(text(100 + number, 40), 60) is not long for number in range(8))
    mixed.router.remove(long)
    stranded = Sequence("r", text(1, 40), 40, 61)
    refused = mixed.router.choose(stranded).core.add(stranded)
    assert refused is not None and refused.error is not None
    assert refused.error.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_a_cancelled_sequence_no_longer_counts() -> None:
    two = fleet(2)
    home = two.send(text(1, 100))
    home.core.cancel("r1")
    chosen = [two.send(text(number, 8)) for number in range(2, 6)]
    assert chosen.count(home) == 2


def test_random_traffic_ends_and_hits() -> None:
    draw = random.Random(1)
    many = fleet(12)
    for _ in range(600):
        many.send(text(draw.randrange(30), 32) + text(1000 + draw.randrange(10**5), 8), 6)
        many.work(draw.randrange(3))
    many.work()
    for link in many.links:
        assert link.core.state.num_sequences == 0
        assert link.core.state.blocks.num_used == 0
    hits = sum(link.core.state.blocks.hits for link in many.links)
    queries = sum(link.core.state.blocks.queries for link in many.links)
    assert hits / queries > 0.5


def test_the_index_finds_the_longest_prefix_and_forgets_the_oldest() -> None:
    index: PrefixIndex[str] = PrefixIndex(capacity=8)
    hashes = [bytes([n]) for n in range(10)]
    assert index.find(hashes) == ((), 0)
    assert index.find([]) == ((), 0)
    index.add(hashes[:5], "a")
    assert index.find(hashes) == (("a",), 4)
    index.add(hashes, "b")
    assert index.find(hashes) == (("b",), 8)
    assert index.find(hashes[:3]) == (("a", "b"), 2)
    index.add(hashes[:1], "a")
    assert index.find(hashes[:1]) == (("b", "a"), 1)
    for number in range(40):
        index.add([b"x%d" % number], "c")
        index.add(hashes[:1], "a")  # asked for again and again: it stays
    assert index.find(hashes) == (("b", "a"), 1)
    for number in range(20):
        index.add(hashes[:1], str(number))
    assert index.find(hashes[:1])[0] == tuple(str(number) for number in range(12, 20))


@pytest.mark.parametrize("count", [2, 20])
def test_what_goes_on_keeps_to_equal_numerics_as_long_as_there_is_room(count: int) -> None:
    links = [Link(numerics="one"), *(Link(numerics="two") for _ in range(count - 1))]
    mixed, (own, *others) = Fleet(*links), links
    sent = [mixed.send(text(n, 20), max_tokens=50, begun_in="one") for n in range(8)]
    assert set(sent) == {own}
    # All its slots are taken: there is no waiting where others have room.
    assert mixed.send(text(9, 20), begun_in="one") in others
    assert mixed.send(text(10, 20), begun_in="three") in others
    own.work()
    assert mixed.send(text(11, 20), begun_in="one") is own
    own.draining = True
    assert mixed.send(text(12, 20), begun_in="one") in others


def test_where_all_must_wait_what_goes_on_waits_for_equal_numerics() -> None:
    own, other = Link(numerics="one"), Link(numerics="two")
    mixed = Fleet(own, other)
    for number in range(30):
        mixed.send(text(number, 20), max_tokens=50)
    for number in range(30, 40):
        assert mixed.send(text(number, 20), begun_in="one") is own


def test_a_sequence_goes_where_its_adapter_is() -> None:
    """Even where the line is longer, its prefix is elsewhere, or it would have to wait for more room."""
    small = Link(Scheduler(capacity(adapters=frozenset({"a"}), num_blocks=40)))
    many = Fleet(Link(), small, Link())
    many.send(text(1, 40))
    many.work()
    assert {many.send(text(1, 40), lora_id="a").core for _ in range(6)} == {small.core}


def test_a_sequence_whose_adapter_is_nowhere_is_refused() -> None:
    many = fleet(2)
    sequence = Sequence("r", text(1, 8), 8, 4, lora_id="a")
    ending = many.router.choose(sequence).core.add(sequence)
    assert ending is not None and ending.error is not None
    assert (ending.error.reason, ending.error.code) == ("ADAPTER_CHANGED", 3)
