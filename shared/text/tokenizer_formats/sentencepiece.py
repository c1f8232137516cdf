"""Models of SentencePiece as the content of a `tokenizer.json`. Standard library only."""

import base64
from collections.abc import Mapping, Sequence
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
) -> Content:
    """The tokenizer of a model.

    `more` are control tokens behind its own. `written` are texts that stand in the input for a piece and come back
    in its place: {"\\n": "<n>"}. `offset` is added to every id. Raises ValueError for pieces that cannot be had.
    """
    known = {piece.text for piece in model.pieces}
    written = {text: piece for text, piece in (written or {}).items() if piece in known}
    pieces = [*model.pieces, *(Piece(text, 0.0, Kind.CONTROL) for text in more)]
    atomic = [p for p in pieces if p.kind == Kind.USER_DEFINED] if model.is_bpe else []
    if any(BLANK in piece.text for piece in atomic):
        raise ValueError("it has pieces of the user's with blanks in them")
    ids = {piece.text: index for index, piece in enumerate(pieces, offset)}
    tokens = [added(p.text, ids[p.text]) for p in pieces if p.kind in _SPECIAL]
    tokens += [added(p.text, ids[p.text], special=False) for p in atomic]
    return content(
        _byte_pairs(pieces, ids, model) if model.is_bpe else _unigram(pieces, offset, model),
        added_tokens=tokens,
        normalizer=sequence("normalizers", _normalizers(model, written)),
        decoder=sequence("decoders", _decoders(model, written)),
    )


def _byte_pairs(
    pieces: Sequence[Piece], ids: Mapping[str, int], model: SentencePieceModel
) -> Content:
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
