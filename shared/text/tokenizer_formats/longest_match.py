"""Tokenizers that take the longest token of their vocabulary that a text goes on with. Standard library only."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shared.text.token_decoder import byte_level_alphabet
from shared.text.tokenizer_formats.content import Content, added, content, replace, sequence

_CHARACTERS = {byte: character for character, byte in byte_level_alphabet().items()}
_NONE = "<no token>"  # in no vocabulary: what no token begins with is an error of the tokenizers library


def longest_match(
    words: Mapping[bytes, int], special: Mapping[str, int], *, joins_blanks: bool = False
) -> Content:
    """From the left the longest of `words`, byte by byte; `special` are found before. `joins_blanks`: as if one blank.

    The words are a pattern: a tree of their first bytes, in which each branch is optional behind a whole word. The
    pattern matches greedily, so a branch is left only where no word lies in it, and no two branches of a node begin
    alike. The model WordPiece would do the same in a time that grows with the square of the text or faster.
    Raises ValueError for words of which hundreds begin one another.
    """
    written = {"".join(_CHARACTERS[byte] for byte in word): index for word, index in words.items()}
    try:
        pattern = _pattern(_tree(filter(None, written)))
    except RecursionError:
        raise ValueError("hundreds of its tokens begin one another") from None
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    blanks = {**replace("", " "), "pattern": {"Regex": " {2,}"}}
    return content(
        {"type": "WordLevel", "vocab": {**written, **special}, "unk_token": _NONE},
        added_tokens=[added(token, index) for token, index in special.items()],
        normalizer=sequence("normalizers", [blanks]) if joins_blanks else None,
        pre_tokenizer=sequence("pretokenizers", [level, {**split, "invert": False}]),
        decoder=level,
    )


def _tree(words: Iterable[str]) -> dict[str, Any]:
    """Nodes by the character that leads to them; "" in those where a word ends."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _pattern(node: Mapping[str, Any]) -> str:
    """Of what follows a node; nodes behind which nothing follows are one class of characters."""
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        prefix += re.escape(character)
    following = {character: below for character, below in node.items() if character}
    leaves = "".join(re.escape(c) for c, below in following.items() if below.keys() == {""})
    branches = [f"[{leaves}]"] if leaves else []
    branches += [
        re.escape(c) + _pattern(below) for c, below in following.items() if below.keys() != {""}
    ]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
