"""Stop strings of a request, found in the bytes of its tokens."""

from collections.abc import Sequence

from services.scheduler.core.beams import Step
from shared.text.stop_search import StopStrings
from shared.text.text_fold import ByteStream, StopFinder, TokenBytes
from tessera.scheduler.v1.queue_pb2 import RequestSpec


def stop_finder(
    table: TokenBytes, stops: StopStrings, spec: RequestSpec, generated: Sequence[int]
) -> StopFinder:
    """Searches the output of one choice, of which these tokens are generated. `stops` are those of the request."""
    finder = StopFinder(
        table,
        stops,
        include_stop=spec.sampling.include_stop_str_in_output,
        skip_special_tokens=spec.reply.skip_special_tokens,
    )
    for token in generated:
        finder.push(token)
    return finder


class BeamStops:
    """Whether the last token of a beam completes a stop string; beams that had one have ended before."""

    def __init__(self, table: TokenBytes, stops: StopStrings, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._pieces = table.shown_pieces if skip_special_tokens else table.pieces
        self._stops = stops.raw
        self._longest = max(map(len, self._stops))

    def __call__(self, step: Step) -> bool:
        """Looks at the end of the text alone: as much of it as a stop string may take."""
        window = self._longest - 1 + len(self._piece(step.token))
        # Spaces that are stripped from the beginning of a text must not be counted.
        wanted = window + self._table.leading_spaces_stripped
        tokens: list[int] = []
        found = 0
        at: Step | None = step
        while at is not None and found < wanted:
            tokens.append(at.token)
            found += len(self._piece(at.token))
            at = at.before
        tokens.reverse()
        if at is None:
            data = b"".join(map(ByteStream(self._table, self._skip).push, tokens))
        else:
            data = b"".join(map(self._piece, tokens))
        end = data[-window:] if window else b""
        return any(stop in end for stop in self._stops)

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""
