"""Files of tiktoken, a line "base64 rank" for each token: Qwen's and GLM-4's. Standard library only."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.bounded_file import LARGE, open_regular, read_bytes
from shared.text.token_decoder import byte_level_alphabet
from shared.text.tokenizer_formats.content import (
    Content,
    added,
    around,
    byte_pairs,
    content,
    sequence,
)
from shared.text.tokenizer_formats.merges import merges

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{index}|>" for index in range(205)),
)
_QWEN_VL_SPECIAL = (
    *("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>"),
    *("<img>", "</img>", "<imgpad>"),
)
GLM_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)


def is_tiktoken(path: Path) -> bool:
    """Whether the first line is of that kind."""
    with open_regular(path) as file:
        first = file.readline(1000).split()
    return len(first) == 2 and first[1].isdigit()


def qwen(ranks: Mapping[bytes, int], *, has_vision: bool) -> Content:
    """Of the ranks of `qwen.tiktoken`: Qwen-VL has more control tokens than Qwen."""
    special = _QWEN_SPECIAL + (_QWEN_VL_SPECIAL if has_vision else ())
    return _content(ranks, special, digits="")


def glm4(ranks: Mapping[bytes, int]) -> Content:
    """Of the ranks of GLM-4's `tokenizer.model`. Texts that stand alone begin with [gMASK] and <sop>."""
    made = _content(ranks, GLM_SPECIAL, digits="{1,3}")
    ids = {token["content"]: token["id"] for token in made["added_tokens"]}
    return {
        **made,
        "post_processor": around({name: ids[name] for name in ("[gMASK]", "<sop>")}, {}),
    }


def _content(ranks: Mapping[bytes, int], special: Sequence[str], digits: str) -> Content:
    """`special` follow the ranks; `digits` as for `byte_level`."""
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}

    def written(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    tokens = [added(token, len(ranks) + place) for place, token in enumerate(special)]
    return content(
        byte_pairs(
            {written(token): rank for token, rank in ranks.items()}
            | {token["content"]: token["id"] for token in tokens},
            [(written(left), written(right)) for left, right in merges(ranks)],
            ignore_merges=True,
        ),
        added_tokens=tokens,
        **byte_level(digits),
    )


def byte_level(digits: str | None) -> dict[str, Content | None]:
    """The parts of a tokenizer beside its model that write a text in the alphabet of bytes, and back.

    `digits` is the pattern of how many go together in a word ("": one, as for Qwen; "{1,3}"). None: no words are cut.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps: list[Content] = [{**level, "use_regex": False}]
    if digits is not None:
        pattern = {"Regex": _PATTERN % digits}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        steps.insert(0, split)
    return {
        "normalizer": {"type": "NFC"} if digits == "" else None,
        "pre_tokenizer": sequence("pretokenizers", steps),
        "decoder": {**level, "use_regex": True},
    }


def read_ranks(path: Path) -> dict[bytes, int]:
    """Raises ValueError unless the ranks are 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    for line in read_bytes(path, LARGE).splitlines():
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{path}: a line is not a token in base64 and its rank: {error}"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks of its tokens are not all whole numbers from 0 on")
    return ranks
