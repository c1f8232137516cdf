"""Parts of the content of a `tokenizer.json`. Standard library only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Content = dict[str, Any]


def content(model: Content, **parts: Any) -> Content:
    """A tokenizer of this model; parts that are not given do nothing."""
    empty = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    return {"version": "1.0", **empty, "added_tokens": [], "model": model, **parts}


def byte_pairs(
    vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]], **options: Any
) -> Content:
    """A model of byte pair encoding."""
    plain = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {
        "type": "BPE",
        "vocab": dict(vocabulary),
        "merges": list(map(list, merges)),
        **plain,
        **options,
    }


def sequence(kind: str, steps: Sequence[Content]) -> Content:
    """`kind` is "normalizers", "pretokenizers" or "decoders"."""
    return {"type": "Sequence", kind: list(steps)}


def replace(pattern: str, text: str) -> Content:
    """A step that puts `text` in the place of a string."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": text}


def added(token: str, index: int, *, special: bool = True) -> Content:
    """A token that is found in a text before anything is done to it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": special}


def around(before: Mapping[str, int], after: Mapping[str, int]) -> Content:
    """A post-processor that puts tokens, by their ids, around a text that stands alone."""
    both = {**before, **after}

    def template(*parts: str) -> list[Content]:
        texts = [{"Sequence": {"id": part, "type_id": 0}} for part in parts]
        return [*map(_special, before), *texts, *map(_special, after)]

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]} for token, index in both.items()
        },
    }


def _special(token: str) -> Content:
    return {"SpecialToken": {"id": token, "type_id": 0}}
