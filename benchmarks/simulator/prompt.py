"""What an arrival asks for, as the core sees it."""

from benchmarks.simulator.decoder import Flight
from benchmarks.simulator.trace import Arrival
from services.scheduler.core.sequence import MediaSpan, Sequence

_PREFIX_BASE = 1 << 30  # first token of prefixes
_OWN_BASE = 100  # first token of what only one request has
_PLACEHOLDER, _WORD = 3, 4


def sequence_of(arrival: Arrival) -> Sequence:
    """Prefix, pictures, own tokens. A token that no other prefix or request has stands for text that no other has."""
    tokens: list[int] = []
    if arrival.prefix_tokens:
        tokens.append(_PREFIX_BASE + arrival.prefix)
        tokens += [_WORD] * (arrival.prefix_tokens - 1)
    media = []
    for picture in arrival.pictures:
        digest = picture.number.to_bytes(16, "little")
        length = picture.tokens
        media.append(MediaSpan(digest, len(tokens), length, length, picture.encode_s))
        tokens += [_PLACEHOLDER] * length
    tokens.append(_OWN_BASE + arrival.number)
    tokens += [_WORD] * (arrival.own_tokens - 1)
    return Sequence(
        str(arrival.number),
        tokens,
        len(tokens),
        arrival.output_tokens,
        media=tuple(media),
        arrival=arrival.number,
        payload=Flight(arrival.at),
    )
