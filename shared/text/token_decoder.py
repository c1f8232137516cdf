"""The decoders of `tokenizer.json` as rules from a token's string to its bytes. Standard library only."""

import codecs
from dataclasses import dataclass
from typing import Any


class UnsupportedTokenizer(ValueError):
    """The tokenizer's decoder or model is of a kind that has no table of bytes here; the message
    names it.
    """


@dataclass(frozen=True, slots=True)
class ByteLevel:
    """GPT-2's alphabet: each byte is written as one printable character."""

    alphabet: dict[str, int]
    leading_spaces_stripped: int = 0
    utf8_errors: str = "replace"

    def piece(self, token: str) -> bytes:
        """The bytes of one token, by its string in the vocabulary."""
        try:
            return bytes([self.alphabet[character] for character in token])
        except KeyError:  # an added token, written as it is
            return token.encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class SentencePieceLike:
    """▁ for a space, <0xNN> for a byte that has no token, and spaces in front that the normalizer
    had added.
    """

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    leading_spaces_stripped: int
    utf8_errors: str = "tessera.replace_each_byte"

    def piece(self, token: str) -> bytes:
        """The bytes of one token, by its string in the vocabulary."""
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode("utf-8", "replace")


def read_decoder(config: dict[str, Any] | None) -> ByteLevel | SentencePieceLike:
    """The rule of a `decoder` entry. Raises UnsupportedTokenizer naming its kind."""
    steps = _flattened(config)
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return ByteLevel(byte_level_alphabet())
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Strip"} or "Strip" in kinds[:-1]:
        raise UnsupportedTokenizer(
            f"tokenizer decoder {' + '.join(kinds) or 'none'} is not supported: "
            "only ByteLevel, and Replace + ByteFallback + Fuse + Strip"
        )
    strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
    if kinds[-1] == "Strip":
        strip = next(step for step in steps if step["type"] == "Strip")
    if strip["content"] != " " or strip["stop"] != 0:
        raise UnsupportedTokenizer(f"tokenizer decoder Strip of {strip} is not supported")
    return SentencePieceLike(
        tuple(_replacement(step) for step in steps if step["type"] == "Replace"),
        "ByteFallback" in kinds,
        strip["start"],
    )


def _flattened(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    if config is None:
        return []
    if config["type"] != "Sequence":
        return [config]
    return [step for inner in config["decoders"] for step in _flattened(inner)]


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if pattern is None:
        raise UnsupportedTokenizer("tokenizer decoder Replace with a regular expression")
    return pattern, step["content"]


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2: printable Latin-1 characters stand for themselves, the other bytes for characters from
    U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """As ByteFallback does: one replacement character for each byte, not for each broken character.

    The library also replaces valid characters that stand in one run of bytes with a broken one. A
    stream cannot, since it has given them out, so a run with both is the one place where the text
    differs.
    """
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("tessera.replace_each_byte", _replace_each_byte)
