"""Tokens whose ids a model has no row for, and the files that name them. Standard library only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.text.tokenizer_file import listed_ids, read_optional, read_tokenizer
from shared.text.tokenizer_formats.other_files import find_other

_BESIDE = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
# Of tokens in whose places a model has rows of media, by tokenizers' files and by config.json.
_MEDIA = re.compile(r".*(image|video|audio|vision|media|img).*_token(_id|_index|_idx)?")
_PADDING = re.compile(r"\W*pad\W*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OutsideToken:
    """`file` is the name of the file that gives the token, or its id."""

    file: str
    text: str
    index: int


def tokens_outside(folder: Path, size: int) -> list[OutsideToken]:
    """The tokens of a folder's tokenizer whose ids are not below `size`, by ids; without those that fill up batches and
    those that stand for media, of which no row is read.

    Raises OSError or ValueError as `read_tokenizer` does.
    """
    path = folder / "tokenizer.json"
    file = read_tokenizer(path)
    ids_by_text = dict(_entries(file.content["model"]))
    ids_by_text |= {token["content"]: token["id"] for token in file.content["added_tokens"]}
    ids_by_text |= {text: index for index, text in listed_ids(folder).items()}
    outside = sorted(
        (index, text)
        for text, index in ids_by_text.items()
        if index >= size and not _PADDING.fullmatch(text)
    )
    if not outside:
        return []
    texts, ids = _unread(folder)
    named = path if path.is_file() else find_other(folder)
    assert named is not None
    return [
        OutsideToken(_file_of(text, folder) or named.name, text, index)
        for index, text in outside
        if text not in texts and index not in ids
    ]


def _entries(model: dict[str, Any]) -> Iterator[tuple[str, int]]:
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # Unigram: [token, score] in the order of ids
        yield from ((entry[0], index) for index, entry in enumerate(vocabulary))


def _unread(folder: Path) -> tuple[set[str], set[int]]:
    """Texts and ids that files of the folder call padding or media."""
    texts: set[str] = set()
    ids: set[int] = set()
    for name in (*_BESIDE, "config.json"):
        for key, value in _pairs(read_optional(folder / name)):
            if key != "pad_token" and not _MEDIA.fullmatch(key):
                continue
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                texts.add(value)
            elif isinstance(value, int):
                ids.add(value)
    return texts, ids


def _pairs(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of an object and of the objects in it."""
    for key, inner in value.items():
        yield key, inner
        if isinstance(inner, dict):
            yield from _pairs(inner)


def _file_of(text: str, folder: Path) -> str | None:
    """Which of the files beside a tokenizer's names a token."""
    return next((name for name in _BESIDE if text in _texts(read_optional(folder / name))), None)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
