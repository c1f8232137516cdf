"""The tokens that stand for pictures, in the tokenizer.json of a folder. Standard library only."""

import json
from pathlib import Path
from typing import Any

from shared.bounded_file import LARGE, OutOfBounds, read_value
from shared.errors import InvalidRequest

_NAME = "tokenizer.json"


def require(folder: Path, token: str, file: Path) -> int:
    """The id of a token. Raises InvalidRequest, naming the file that the tokenizer is of, where it has none."""
    found = _ids(_read(folder)).get(token)
    if found is None:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{file}: the vocabulary of its language model has no token {token}, which pictures need; --mmproj none"
            " answers to text alone",
            field="model",
        )
    return found


def find_or_add(folder: Path, token: str) -> int:
    """The id of a token, which becomes one behind all others where the tokenizer has none: rows of pictures take its
    places, and no row of the embedding is read for it."""
    content = _read(folder)
    ids = _ids(content)
    if token in ids:
        return ids[token]
    number = max(ids.values(), default=-1) + 1
    added = {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    content["added_tokens"] = [*content["added_tokens"], added]
    (folder / _NAME).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return number


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = read_value(folder / _NAME, LARGE)
        _ids(content)
    except OutOfBounds as error:
        raise _bad(folder, str(error)) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _bad(folder, f"{_NAME} cannot be used: {error}") from None
    found: dict[str, Any] = content
    return found


def _ids(content: dict[str, Any]) -> dict[str, int]:
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # of Unigram: [token, score] in the order of ids
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content["added_tokens"]}}


def _bad(folder: Path, what: str) -> InvalidRequest:
    return InvalidRequest("BAD_CHECKPOINT", f"{folder}: {what}", field="model")
