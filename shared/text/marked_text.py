"""Text from token ids in which some tokens, markers, are one character each that no decoded text can hold."""

from collections import deque
from collections.abc import Mapping

from shared.text.stop_search import StopStrings
from shared.text.text_fold import TextFold, TokenBytes


class MarkedText(TextFold):
    """As `TextFold`, and stop strings are found in the same bytes: a marker's are those that it has without this class.
    A marker of which a stop string takes a part is text.
    """

    def __init__(
        self,
        table: TokenBytes,
        skip_special_tokens: bool,
        stops: StopStrings | None,
        include_stop: bool,
        marks: Mapping[int, str],
    ) -> None:
        """`marks`: the character of each marker's id."""
        super().__init__(table, skip_special_tokens, stops, include_stop)
        self._marks = marks
        # Places in the output in bytes: its end, what has been given out, and the markers between them.
        self._size = self._given = 0
        self._waiting: deque[tuple[int, int, str]] = deque()
        self._rest = b""  # of a marker of which only a part is certain

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that is certain now."""
        data = self._stream.push(token_id)
        start, self._size = self._size, self._size + len(data)
        if token_id in self._marks:
            self._waiting.append((start, self._size, self._marks[token_id]))
        if self._search is not None:
            data, _ = self._search.push(data)
        if not self._waiting:
            self._given += len(data)
            return self._decode(data)
        return self._marked(data)

    def finish(self, cut: int = 0) -> str:
        """See `TextFold.finish`."""
        held = bytes(self._search.held) if self._search else b""
        if cut > len(held):
            raise ValueError(f"cut of {cut} bytes, but only {len(held)} are held back")
        if self._search:
            self._search.held = b""
        text = self._marked(held[: len(held) - cut])
        return text + self._decode(self._rest, True)

    def _marked(self, data: bytes) -> str:
        data, self._rest, text = self._rest + data, b"", ""
        while self._waiting:
            start, end, mark = self._waiting[0]
            before = start - self._given
            if self._given + len(data) < end:
                cut = max(0, before)
                self._rest, data = data[cut:], data[:cut]
                break
            self._waiting.popleft()
            # A character that is not whole here never will be.
            text += self._decode(data[:before], True) + mark
            data, self._given = data[end - self._given :], end
        self._given += len(data)
        return text + self._decode(data)
