"""A language model made of arithmetic: which token follows, and how probable each is.

What a real cache holds of a position depends on all tokens up to it; here it is one number that does, the *state*.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.decoder.steps.needs import AttentionKind, Needs
from shared.block_hash import prefix_digest, root_name

BLOCK_SIZE = 4
FIRST_PICTURE_VALUE = 1 << 20  # above all token ids

_MASK = (1 << 64) - 1


def mix(before: int, token: int) -> int:
    """The state of a position, from that of the one before and the position's token."""
    value = (before ^ (token + 0x632BE59BD9B4E019)) * 0xD6E8FEB86659FD93 & _MASK
    return value ^ value >> 32


def _number(root: bytes) -> int:
    return int.from_bytes(root[:8], "little")


# The first state of sequences without salt, of a model without special needs.
PLAIN_START = _number(root_name(BLOCK_SIZE, "", b""))


def state_after(tokens: Sequence[int], first: int = PLAIN_START) -> int:
    """The state of the last of these tokens; `first` is the one before them."""
    for token in tokens:
        first = mix(first, token)
    return first


def first_state(root: bytes, prefix: Sequence[int] = ()) -> int:
    """The state before the first token of a sequence whose first block has this parent. `prefix`: what all of its
    tokens depend on.
    """
    return state_after(prefix, _number(root))


def has_prefix(needs: Needs) -> bool:
    """Whether all tokens of a sequence depend on its whole prompt."""
    return needs.attention is AttentionKind.PREFIX_LM


def is_alone(needs: Needs) -> bool:
    """Whether no sequence begins with the blocks of another."""
    return needs.state or needs.whole_prompt


def root_of(
    needs: Needs,
    salt: bytes,
    prompt: Sequence[int],
    media: Mapping[int, bytes],
    block_size: int = BLOCK_SIZE,
    content: bytes = b"",
) -> bytes:
    """The parent of a sequence's first block, of its prompt and the names of pictures by their places in it; empty
    where nobody else may find its blocks. `content`: of the decoder's weights."""
    if is_alone(needs):
        return b""
    prefix = b""
    if has_prefix(needs):
        pictures = [digest + struct.pack("<i", place) for place, digest in media.items()]
        prefix = prefix_digest(np.asarray(prompt, "<i4").tobytes(), b"".join(pictures))
    return root_name(block_size, "", salt, prefix, content)


def picture_value(digest: bytes, row: int) -> int:
    """The value that takes the place of a token id where an embedding row of a picture is used."""
    return FIRST_PICTURE_VALUE + 1000 * digest[0] + row


@dataclass(frozen=True)
class Model:
    """Chooses tokens below `vocabulary`; about one in `stop_every` is `stop_token`."""

    vocabulary: int = 200
    stop_token: int = 0
    stop_every: int = 60
    rounding: int = (
        0  # another number stands for other numerics: it chooses otherwise from the same state
    )

    def next_token(self, state: int, choice: int = 0) -> int:
        """The token that follows."""
        value = mix(state, 7_000_003 * (choice + 1) + self.rounding)
        if value % self.stop_every == 0:
            return self.stop_token
        return 1 + (value >> 8) % (self.vocabulary - 1)

    def generate(
        self, prompt: Sequence[int], choice: int, count: int, stops: bool, first: int
    ) -> list[int]:
        """What an undisturbed run gives from the state `first` on: `count` tokens, fewer where one ends it."""
        state = state_after(prompt, first)
        output: list[int] = []
        while len(output) < count:
            output.append(self.next_token(state, choice))
            state = mix(state, output[-1])
            if stops and output[-1] == self.stop_token:
                break
        return output

    def logprobs(self, state: int) -> list[float]:
        """The log-probability of each token, as float32 has it."""
        ids = np.arange(self.vocabulary)
        weights = 1.0 + (state % 1009 * (7 * ids + 3) + ids * ids) % 1009 / 7.0
        values: list[float] = np.log(weights / weights.sum()).astype(np.float32).tolist()
        return values

    def top(self, state: int, k: int) -> list[tuple[int, float]]:
        """The `k` most probable tokens and their log-probabilities, descending."""
        values = self.logprobs(state)
        ranked = sorted(range(self.vocabulary), key=lambda token: (-values[token], token))[:k]
        return [(token, values[token]) for token in ranked]


MODEL = Model()


def rounding(numerics: str) -> Model:
    """The model as decoders of these numerics compute it: "name-3" stands for the rounding 3."""
    return Model(rounding=int(numerics.rpartition("-")[2] or 0))


def generate(prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
    """So many tokens that one choice of a plain sequence must give, whatever the schedule."""
    return MODEL.generate(prompt, choice, count, stops=False, first=PLAIN_START)
