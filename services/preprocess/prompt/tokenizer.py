"""The checkpoint's tokenizer, with a guard: what a user writes never becomes a control token.

Equal to transformers' `AutoTokenizer` on the same folder (tested), without importing it.
"""

import re
from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken

from shared.errors import InvalidRequest
from shared.text.guard import GUARD
from shared.text.rust_panic import RustPanic
from shared.text.tokenizer_file import read_tokenizer
from shared.text.tokenizer_library import open_tokenizer, token_ids

Ids = npt.NDArray[np.int32]


class PromptTokenizer:
    """Text to token ids, for one checkpoint folder. Raises InvalidRequest if it has no tokenizer."""

    def __init__(self, folder: Path) -> None:
        try:
            file = read_tokenizer(folder / "tokenizer.json")
        except FileNotFoundError as error:
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"{error.filename} is missing: save the tokenizer with AutoTokenizer.save_pretrained",
            ) from None
        except ValueError as error:
            raise InvalidRequest(
                "BAD_CHECKPOINT", f"the tokenizer cannot be used: {error}"
            ) from error
        self._tokenizer = open_tokenizer(file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = file.special_tokens
        self._prefix, self._suffix = self._added_around()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self._whole_words = {token.content for token in added if token.single_word}
        self._control = _pattern(self._special, self._whole_words)
        self._marker = _pattern(())
        self._longest_control = max(map(len, self._special), default=1)
        self._continues = self._continuation_prefix()
        self.longest_token = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def add_marker(self, text: str) -> int:
        """The id of a text that the checkpoint has no token for, from now on a token here, beyond its vocabulary."""
        self._tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        number = self._tokenizer.token_to_id(text)
        assert number is not None
        return number

    def protect(self, *markers: str) -> None:
        """Makes tokens ones that users cannot write, whether the tokenizer calls them special or not."""
        self._control = _pattern({*self._special, *markers}, self._whole_words)
        self._marker = _pattern(markers)
        self._longest_control = max(self._longest_control, *map(len, markers))

    @property
    def vocab_size(self) -> int:
        """Ids below this have a token, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_text(self, number: int) -> str:
        """A token's text, by its id. Raises InvalidRequest for an id without a token."""
        text: str | None = self._tokenizer.id_to_token(number)
        if text is None:
            raise InvalidRequest(
                "BAD_CHECKPOINT", f"tokenizer.json has no token {number}, which config.json names"
            )
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token, by its text."""
        return self._tokenizer.token_to_id(token)

    def guard(self, text: str) -> str:
        """User text that `encode` will not read control tokens in."""
        return _guarded(text, self._control)

    def guard_parts(self, texts: Sequence[str]) -> list[str]:
        """`guard` for texts that a template may put together without anything between them."""
        guarded = [self.guard(text) for text in texts]
        reach = self._longest_control - 1
        for index in range(len(guarded) - 1):
            joint = guarded[index][-reach:] + guarded[index + 1][:reach]
            if self._control is not None and self._control.search(joint):
                guarded[index] += GUARD
        return guarded

    def guard_marker(self, text: str) -> str:
        """User text in which only the image placeholder means nothing; other control tokens are read."""
        return _guarded(text, self._marker)

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        field: str = "prompt",
        pair: str | None = None,
        most: int = 0,
    ) -> Ids:
        """Token ids of a text; control tokens are read where they are not guarded. Runs without the GIL.

        `add_special_tokens` puts the checkpoint's own begin and end tokens around it; `pair` stands behind it, as the
        checkpoint puts two texts together. Of more than `most` tokens (0: any number) the end is left out, but for the
        checkpoint's own tokens. Raises InvalidRequest, which names the `field` that the text came in, where the
        tokenizer has no token for a part of it or gives up.
        """
        before: list[int] = []
        between, behind = before, before
        if add_special_tokens:
            before, behind = self._prefix, self._suffix
            if pair is not None:
                before, between, behind = self._around_pair
        try:
            ids = [*before, *self._guarded_ids(text)]
            if pair is not None:
                ids += [*between, *self._guarded_ids(pair)]
        except RustPanic as error:
            raise InvalidRequest(
                "TOKENIZER_GAVE_UP",
                f"{field}: the model's tokenizer gives up on this text ({error}): long runs of one kind of character"
                " are the usual reason; shorten or break them",
                field=field,
            ) from error
        except Exception as error:  # the library has no class of its own
            raise InvalidRequest(
                "NO_TOKEN",
                f"{field}: the model's tokenizer has no token for a part of the text: {error}",
                field=field,
            ) from error
        if most and len(ids) + len(behind) > most:
            ids = ids[: max(0, most - len(behind))]
        return np.array([*ids, *behind], np.int32)

    def _guarded_ids(self, text: str) -> list[int]:
        first, *rest = text.split(GUARD)
        ids = self._ids(first)
        for piece in rest:
            ids += self._continued(piece)
        return ids

    def _ids(self, text: str) -> list[int]:
        return token_ids(self._tokenizer, text)

    def _continued(self, piece: str) -> list[int]:
        """Ids of a piece from the middle of a text: without the space that some tokenizers put before a text."""
        if not piece:
            return []
        if self._continues:
            ids = self._ids("\n" + piece)
            if ids[: len(self._continues)] == self._continues:
                return ids[len(self._continues) :]
        return self._ids(piece)

    def _continuation_prefix(self) -> list[int]:
        """What stands before a text behind a newline, where the tokenizer changes the beginning of a text."""
        alone, behind = self._ids("a"), self._ids("\na")
        changes = behind[-len(alone) :] != alone
        return self._ids("\n") if changes else []

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Ids that go before and after a text that stands alone.

        tokenizer.json decides; transformers ignores `add_bos_token` in tokenizer_config.json beside it.
        """
        bare = self._ids("a")
        full: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    @cached_property
    def _around_pair(self) -> tuple[list[int], list[int], list[int]]:
        """Ids that go before, between and after two texts."""
        bare = self._ids("a")
        full: list[int] = self._tokenizer.encode("a", "a", add_special_tokens=True).ids
        found = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
        if len(found) < 2:
            return self._prefix, [], self._suffix
        first, second = found[0], found[-1]
        return full[:first], full[first + len(bare) : second], full[second + len(bare) :]


def _pattern(words: Iterable[str], whole: Container[str] = ()) -> re.Pattern[str] | None:
    """Matches the words; those in `whole` unless a letter stands beside them, as in "philosophy" beside "sop"."""
    # A token of one character cannot be cut; none is a control token in practice.
    longest_first = sorted((word for word in words if len(word) > 1), key=len, reverse=True)
    if not longest_first:
        return None
    found = [
        rf"(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])" if word in whole else re.escape(word)
        for word in longest_first
    ]
    # Whatever the case: a template may lower the client's words before they are tokenized.
    return re.compile("|".join(found), re.IGNORECASE)


def _guarded(text: str, control: re.Pattern[str] | None) -> str:
    text = text.replace(GUARD, "")
    # Again and again, because what is behind a cut may be a control token as well.
    while control is not None and control.search(text):
        text = control.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)
    return text
