"""Which processes are killed, or which other fault the system gets, and when."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.kill.overload import OVERLOADS

# Name on the command line -> service.
SERVICES = {
    "gateway": "gateway",
    "preprocess": "preprocess",
    "encoder": "vision_encoder",
    "vision_encoder": "vision_encoder",
    "vision-encoder": "vision_encoder",
    "scheduler": "scheduler",
    "decoder": "decoder",
    "redis": "redis",
}
_HOW = ("kill", "stop", "term", "full-disk", "rank")
EVERY_ROOM = ("gateway", "decoder", "scheduler", "encoder", "preprocess", "redis")
_LATEST = 0.8  # of a round's time without kills
# These work on a request for a moment after it has come, and then not again.
_EARLY_SERVICES = {"preprocess", "vision_encoder"}
_EARLY_S = 0.5


@dataclass(frozen=True, slots=True)
class Victim:
    """One fault: a process of each of these services, at the same time killed, frozen (stop), asked to end (term),
    killed while the disk of the state folder is full, or left without another rank, which is killed (rank); or no
    process, but a load that no client should make.
    """

    text: str  # as it was asked for
    services: tuple[str, ...]
    how: str = "kill"

    @property
    def freezes(self) -> bool:
        """Whether it comes back as it was."""
        return self.how == "stop"

    @property
    def overload(self) -> str:
        """Which load it is; empty for a fault of processes."""
        return "" if self.services else self.text

    @property
    def needs_full_disk(self) -> bool:
        """Whether the disk of the state folder is to be filled for it."""
        return self.how == "full-disk"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "decoder", "decoder:stop", "decoder:term", "decoder:full-disk", "decoder:rank", "decoder+scheduler" or
        the name of a load. Raises ValueError.
        """
        if text in OVERLOADS:
            return cls(text, (), "overload")
        names, _, how = text.partition(":")
        if how not in ("", *_HOW):
            raise ValueError(
                f"{text!r}: a victim is killed, frozen with :stop, drained with :term, killed on a full disk with "
                ":full-disk, or another rank of it is with :rank"
            )
        services = []
        for name in names.split("+"):
            if name not in SERVICES:
                known = ", ".join((*EVERY_ROOM, *OVERLOADS))
                raise ValueError(f"there is no service or load {name!r}: {known}")
            services.append(SERVICES[name])
        return cls(text, tuple(services), how or "kill")

    @classmethod
    def parse_all(cls, text: str) -> list[Self]:
        """Reads several, separated by commas. Raises ValueError."""
        victims = [cls.parse(part.strip()) for part in text.split(",") if part.strip()]
        if not victims:
            raise ValueError(f"nobody is to be killed: name some of {', '.join(EVERY_ROOM)}")
        return list(dict.fromkeys(victims))

    def moment(self, draw: random.Random, round_s: float) -> float:
        """Seconds from the first request of a round, which takes `round_s` without kills."""
        latest = _LATEST * round_s
        if self.services and _EARLY_SERVICES.issuperset(self.services):
            latest = min(latest, _EARLY_S)
        return draw.uniform(0.0, latest)


def order_of_kills(victims: Sequence[Victim], times: int, seed: int) -> list[Victim]:
    """Each victim so many times, in an order that the seed draws."""
    kills = [victim for victim in victims for _ in range(times)]
    random.Random(f"{seed}/order").shuffle(kills)
    return kills
