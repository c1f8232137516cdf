"""A model of SentencePiece as its library writes it: a message of protobuf. Standard library only.

The fields' numbers are those of sentencepiece_model.proto, https://github.com/google/sentencepiece.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from shared.bounded_file import LARGE, OutOfBounds, read_bytes


class Kind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """`is_bpe`: byte pair encoding, else a unigram model. The other fields are the library's, under its names."""

    pieces: list[Piece]
    is_bpe: bool
    byte_fallback: bool
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


_UNIGRAM, _BPE = 1, 2


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ValueError for what is no such file, or a model of an option that is not known."""
    try:
        return _read(read_bytes(path, LARGE))
    except OutOfBounds:
        raise
    except (IndexError, struct.error, TypeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is no SentencePiece model that can be used: {error}") from error


def _read(data: bytes) -> SentencePieceModel:
    pieces = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append(Piece(piece[1].decode(), score, Kind(piece.get(3, Kind.NORMAL))))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if not pieces or kind not in (_UNIGRAM, _BPE):
        raise ValueError("it is neither a unigram model nor one of byte pair encoding")
    if trainer.get(24) or not normalizer.get(5, True):
        raise ValueError("it puts blanks behind words, or does not escape them")
    if any(piece.kind == Kind.UNUSED for piece in pieces):
        raise ValueError("it has pieces that are not used")
    return SentencePieceModel(
        pieces,
        is_bpe=kind == _BPE,
        byte_fallback=bool(trainer.get(35, False)),
        precompiled_charsmap=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message: int for a varint, otherwise bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"a field of wire type {wire}")
        size = {1: 8, 5: 4}.get(wire)
        if size is None:
            size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError("it is cut short")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
