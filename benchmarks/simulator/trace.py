"""Requests of a simulation: generated, or read from a file."""

import bisect
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SURGE_S = 0.2  # of each second


class Picture(NamedTuple):
    """An image: equal numbers are equal images."""

    number: int
    tokens: int
    encode_s: float


class Arrival(NamedTuple):
    """A request: `prefix_tokens` that all with the same `prefix` share, then tokens of its own."""

    number: int
    at: float  # seconds from the start
    prefix: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    pictures: tuple[Picture, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, pictures included."""
        return self.prefix_tokens + self.own_tokens + sum(p.tokens for p in self.pictures)


@dataclass(frozen=True)
class TraceOptions:
    """A generated trace. Lengths of prefixes, own prompts and answers vary around their means."""

    requests: int = 10_000
    rate: float = 200.0  # requests a second
    burstiness: float = (
        1.0  # shape of the gamma distribution of gaps; 1 is Poisson, below comes in bursts
    )
    surge: float = 1.0  # times the mean rate in the first fifth of each second; below 5
    prefixes: int = 1_000  # different ones, their popularity by Zipf's law
    zipf: float = 1.0  # exponent
    prefix_tokens: int = 256
    own_tokens: int = 256
    output_tokens: int = 64
    with_picture: float = 0.0  # share of requests
    pictures: int = 10_000  # different ones, their popularity by Zipf's law too
    picture_tokens: int = 441
    encode_s: float = 0.05
    seed: int = 0


def generated(options: TraceOptions) -> Iterator[Arrival]:
    """The same for equal options."""
    draw = random.Random(options.seed)
    prefix_of = _Zipf(options.prefixes, options.zipf)
    picture_of = _Zipf(options.pictures, options.zipf)
    # A prefix has one length for all who share it: between half and one and a half of the mean.
    half = options.prefix_tokens // 2
    lengths = [half + draw.randrange(options.prefix_tokens + 1) for _ in range(options.prefixes)]
    scale = 1 / (options.rate * options.burstiness)
    calm = (1 - _SURGE_S * options.surge) / (1 - _SURGE_S)
    at = 0.0
    for number in range(options.requests):
        rush = options.surge if at % 1.0 < _SURGE_S else calm
        at += draw.gammavariate(options.burstiness, scale) / rush
        prefix = prefix_of.draw(draw)
        pictures: tuple[Picture, ...] = ()
        if options.with_picture and draw.random() < options.with_picture:
            chosen = picture_of.draw(draw)
            pictures = (Picture(chosen, options.picture_tokens, options.encode_s),)
        yield Arrival(
            number,
            at,
            prefix,
            lengths[prefix],
            _about(draw, options.own_tokens),
            _about(draw, options.output_tokens),
            pictures,
        )


def read(path: Path) -> Iterator[Arrival]:
    """A file with one JSON object a line, by time: `at` (seconds), `prompt_tokens`, `output_tokens`, and optionally
    `prefix` (any name) with `prefix_tokens` of the prompt, and `images` (a list of `digest`, `tokens`, `encode_s`).
    """
    prefixes: dict[str, int] = {}
    images: dict[str, int] = {}
    with path.open() as lines:
        for number, line in enumerate(filter(str.strip, lines)):
            content = json.loads(line)
            pictures = tuple(
                Picture(
                    images.setdefault(str(image["digest"]), len(images)),
                    int(image["tokens"]),
                    float(image["encode_s"]),
                )
                for image in content.get("images", ())
            )
            # Who names no prefix has one of his own.
            name = str(content.get("prefix", f"\0{number}"))
            shared = int(content.get("prefix_tokens", 0))
            rest = int(content["prompt_tokens"]) - shared - sum(p.tokens for p in pictures)
            if rest < 1:
                raise ValueError(f"line {number + 1}: prompt_tokens must exceed prefix and images")
            yield Arrival(
                number,
                float(content["at"]),
                prefixes.setdefault(name, len(prefixes)),
                shared,
                rest,
                int(content["output_tokens"]),
                pictures,
            )


class _Zipf:
    """Draws 0 .. count-1 with probability proportional to 1 / (rank + 1) ** exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        weights = ((rank + 1) ** -exponent for rank in range(count))
        self._sums = list(itertools.accumulate(weights))

    def draw(self, source: random.Random) -> int:
        return min(bisect.bisect(self._sums, source.random() * self._sums[-1]), len(self._sums) - 1)


def _about(draw: random.Random, mean: int) -> int:
    """Between 1 and four times the mean, with that mean (a gamma distribution of shape 2, cut)."""
    return max(1, min(4 * mean, round(draw.gammavariate(2, mean / 2))))
