"""Models of SentencePiece as the content of a `tokenizer.json`. Standard library only."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.text.tokenizer_formats.content import (
    Content,
    added,
    byte_pairs,
    content,
    replace,
    sequence,
)
from shared.text.tokenizer_formats.merges import merges
from shared.text.tokenizer_formats.sentencepiece_file import Kind, Piece, SentencePieceModel

BLANK = "▁"
_SPECIAL = (Kind.UNKNOWN, Kind.CONTROL)


def sentencepiece(
    model: SentencePieceModel,
    more: Sequence[str] = (),
    *,
    written: Mapping[str, str] | None = None,
    offset: int = 0,
    renamed: Mapping[int, str] | None = None,
) -> Content:
    """The tokenizer of a model.

    `more` are control tokens behind its own. `written` are texts that stand in the input for a piece and come back
    in its place: {"\\n": "<n>"}. `offset` is added to every id. `renamed` are other texts of pieces, by their places;
    no text is made of such a piece any more. Raises ValueError for pieces that cannot be had.
    """
    known = {piece.text for piece in model.pieces}
    written = {text: piece for text, piece in (written or {}).items() if piece in known}
    pieces = _renamed(model.pieces, renamed or {})
    pieces += [Piece(text, 0.0, Kind.CONTROL) for text in more]
    apart = set(written.values())
    atomic = [p for p in pieces if p.kind == Kind.USER_DEFINED and p.text not in apart]
    atomic = atomic if model.is_bpe else []
    if any(BLANK in piece.text for piece in atomic):
        raise ValueError("it has pieces of the user's with blanks in them")
    ids = {piece.text: index for index, piece in enumerate(pieces, offset)}
    ids |= {text: offset + place for place, text in (renamed or {}).items() if place < len(pieces)}
    tokens = [added(p.text, ids[p.text]) for p in pieces if p.kind in _SPECIAL]
    tokens += [added(p.text, ids[p.text], special=False) for p in atomic]
    return content(
        _byte_pairs(pieces, ids, model, by_entry=bool(apart))
        if model.is_bpe
        else _unigram(pieces, offset, model),
        added_tokens=tokens,
        normalizer=sequence("normalizers", _normalizers(model, written)),
        pre_tokenizer=_cut_at(apart) if model.is_bpe and apart else None,
        decoder=sequence("decoders", _decoders(model, written)),
    )


def _cut_at(pieces: Iterable[str]) -> Content:
    """Each of these pieces becomes a word by itself: they come about in a text when it is normalized, which is too late
    for added tokens."""
    pattern = {"Regex": "|".join(sorted(map(re.escape, pieces), key=len, reverse=True))}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _renamed(pieces: Sequence[Piece], texts: Mapping[int, str]) -> list[Piece]:
    """Pieces whose text stays the same stay what they are, and so do control tokens."""

    def renamed(place: int, piece: Piece) -> Piece:
        text = texts.get(place, piece.text)
        kept = text == piece.text or piece.kind in _SPECIAL
        return Piece(text, piece.score, piece.kind if kept else Kind.UNUSED)

    return [renamed(place, piece) for place, piece in enumerate(pieces)]


def _byte_pairs(
    pieces: Sequence[Piece], ids: Mapping[str, int], model: SentencePieceModel, *, by_entry: bool
) -> Content:
    """`by_entry`: a word that is an entry of the vocabulary is that, whether pairs make it or not."""
    normal = [piece for piece in pieces if piece.kind == Kind.NORMAL]
    normal.sort(key=lambda piece: -piece.score)
    ranks = {piece.text: rank for rank, piece in enumerate(normal)}
    unknown = next((piece.text for piece in pieces if piece.kind == Kind.UNKNOWN), None)
    return byte_pairs(
        ids,
        merges(ranks),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=by_entry,
    )


def _unigram(pieces: Sequence[Piece], offset: int, model: SentencePieceModel) -> Content:
    highest = max((p.score for p in pieces if p.kind == Kind.NORMAL), default=0.0)
    lowest = min((p.score for p in pieces if p.kind == Kind.NORMAL), default=0.0)

    def score(piece: Piece) -> float:
        if piece.kind == Kind.USER_DEFINED:  # as the library rates them, by bytes
            return len(piece.text.encode()) * highest - 0.1
        # Control tokens are never made of a text.
        return piece.score if piece.kind == Kind.NORMAL else lowest - 1000

    unknown = next(i for i, piece in enumerate(pieces) if piece.kind == Kind.UNKNOWN)
    before = [[f"<image_{index}>", lowest - 1000] for index in range(offset)]
    return {
        "type": "Unigram",
        "unk_id": unknown + offset,
        "vocab": before + [[piece.text, score(piece)] for piece in pieces],
        "byte_fallback": model.byte_fallback,
    }


def _normalizers(model: SentencePieceModel, written: Mapping[str, str]) -> list[Content]:
    steps: list[Content] = [replace(text, piece) for text, piece in written.items()]
    if model.precompiled_charsmap:
        charsmap = base64.b64encode(model.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.remove_extra_whitespaces:
        # Blanks alone: the library's step Strip takes line breaks too.
        for pattern, text in ((r"\A +| +\z", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": text})
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": BLANK})
    return [*steps, replace(" ", BLANK)]


def _decoders(model: SentencePieceModel, written: Mapping[str, str]) -> list[Content]:
    steps: list[dict[str, Any]] = [replace(piece, text) for text, piece in written.items()]
    steps.append(replace(BLANK, " "))
    if model.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if model.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps
