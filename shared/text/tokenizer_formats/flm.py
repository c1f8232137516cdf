"""Vocabularies of FastLLM's `.flm` as the content of a `tokenizer.json`. Standard library only."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.text.token_decoder import byte_level_alphabet
from shared.text.tokenizer_formats import tiktoken
from shared.text.tokenizer_formats.content import Content, added, around, byte_pairs, content
from shared.text.tokenizer_formats.longest_match import longest_match
from shared.text.tokenizer_formats.merges import merges
from shared.text.tokenizer_formats.other_files import CHATGLM_TOKENS, chatglm
from shared.text.tokenizer_formats.sentencepiece import BLANK, sentencepiece
from shared.text.tokenizer_formats.sentencepiece_file import Kind, Piece, SentencePieceModel

_NAMED = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
_CONTROL = ("<s>", "</s>", "<pad>")
_UNKNOWN = "<unk>"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# FastLLM puts the token of a text's beginning before a prompt of these.
_BEGIN_TYPES = ("llama", "mistral", "internlm2")
# What FastLLM's early versions wrote to the text for these.
_WRITTEN = {b"<n>": b"\n", b"<|tab|>": b"\t"}
# InternLM2's control tokens lie at pieces of its model that have no use.
_INTERNLM2 = ("plugin", "interpreter", "action_end", "action_start", "im_end", "im_start")
_INTERNLM2_FIRST = 92_538


@dataclass(frozen=True, slots=True)
class Word:
    """A token. `score`: with the highest the pair that makes it is merged first; None where nothing is merged."""

    text: bytes
    index: int
    score: float | None


def flm_tokenizer(
    words: Sequence[Word], special_tokens: Iterable[str], pairs: Mapping[str, str]
) -> Content:
    """The tokenizer of a vocabulary. `pairs` are the file's, which name the model and its control tokens.

    Without scores a text is cut into the longest tokens that it goes on with. With scores neighbours are merged, those
    that make the token of the highest score first, in the whole text: where the model's own tokenizer cuts it into
    words before, only Qwen's rule is known. Raises ValueError for a vocabulary that cannot be used.
    """
    kind = pairs.get("model_type")
    if not words:
        raise ValueError("it has no vocabulary")
    if kind == "qwen":
        return tiktoken.qwen(_ranks(words, ()), has_vision=False)
    if pairs.get("tokenizer_class") == "GLM4Tokenizer":
        return tiktoken.glm4(_ranks(words, tiktoken.GLM_SPECIAL))
    special = _special(words, special_tokens, pairs)
    is_scored = words[0].score is not None
    if not is_scored:
        made = _longest(words, special, pairs)
    elif _is_true(pairs, "tokenizer_byte_as_char", default=False):
        made = _byte_level(words, special, has_qwens_words=kind == "qwen2")
    else:
        model = _model(words, special, pairs)
        made = chatglm(model) if kind == "chatglm" else sentencepiece(model)
    ids = {token["content"]: token["id"] for token in made["added_tokens"]}
    begin = next((t for t, index in ids.items() if str(index) == pairs.get("bos_token_id")), None)
    if begin is not None and kind in _BEGIN_TYPES:
        made["post_processor"] = around({begin: ids[begin]}, {})
    return made


def _special(
    words: Sequence[Word], special_tokens: Iterable[str], pairs: Mapping[str, str]
) -> dict[str, int]:
    """Ids of control tokens: those that the file lists, those of the pairs, and those of usual names.

    Raises ValueError for one that has no id.
    """
    by_text = {word.text: word.index for word in words}
    by_id = {word.index: word.text for word in words}
    own: dict[str, int | None] = {}
    if pairs.get("model_type") == "internlm2":
        for index, name in enumerate(_INTERNLM2, _INTERNLM2_FIRST):
            if by_id.get(index, b"").startswith(b"[UNUSED_TOKEN"):
                own[f"<|{name}|>"] = index
    found = own | {t: by_text.get(t.encode()) for t in special_tokens if t not in own}
    if missing := sorted(text for text, index in found.items() if index is None):
        raise ValueError(f"the special tokens {missing} are not in its vocabulary")
    named = [by_id.get(int(n)) for key in _NAMED for n in re.findall(r"\d+", pairs.get(key, ""))]
    texts = [*named, *map(str.encode, (*_CONTROL, _UNKNOWN))]
    found |= {
        text.decode(): by_text[text]
        for text in texts
        if text and text in by_text and by_text[text] not in own.values()
    }
    return {text: index for text, index in found.items() if index is not None}


def _longest(words: Sequence[Word], special: dict[str, int], pairs: Mapping[str, str]) -> Content:
    """Blanks, line breaks and tabs are written into the tokens that stand for them."""
    blank = BLANK.encode()
    has_blanks = any(blank in word.text for word in words)
    texts: dict[bytes, int] = {}
    for word in words:
        if word.index in special.values():
            continue
        text = _WRITTEN.get(word.text, word.text).replace(blank, b" ")
        if text in texts:
            raise ValueError(f"its tokens {texts[text]} and {word.index} are both {text!r}")
        texts[text] = word.index
    is_chatglm = pairs.get("model_type") == "chatglm"
    if is_chatglm:
        behind = max(word.index for word in words) + 1
        special |= {name: behind + place for place, name in enumerate(CHATGLM_TOKENS)}
    joins = has_blanks and _is_true(pairs, "tokenizer_remove_extra_whitespaces", default=True)
    made = longest_match(texts, special, joins_blanks=joins)
    if is_chatglm:
        before = {name: special[name] for name in ("[gMASK]", "sop")}
        made["post_processor"] = around(before, {})
        for token in made["added_tokens"]:
            token["single_word"] = token["content"] in ("sop", "eop")
    return made


def _byte_level(
    words: Sequence[Word], special: Mapping[str, int], *, has_qwens_words: bool
) -> Content:
    """Tokens are written in GPT-2's alphabet; what nothing is merged to has a score above 0."""
    alphabet = byte_level_alphabet()
    texts = [(word.text.decode(), word) for word in words]
    plain = [
        (text, word.score or 0.0)
        for text, word in texts
        if text not in special and (len(text) == 1 or (word.score or 0.0) <= 0)
    ]
    if any(character not in alphabet for text, _ in plain for character in text):
        raise ValueError("its tokens are not written in the alphabet of bytes")
    plain.sort(key=lambda item: (len(item[0]) > 1, -item[1]))
    ranks = {text: rank for rank, (text, _) in enumerate(plain)}
    return content(
        byte_pairs({text: word.index for text, word in texts}, merges(ranks)),
        added_tokens=[added(text, index) for text, index in special.items()],
        **tiktoken.byte_level(digits="" if has_qwens_words else None),
    )


def _model(
    words: Sequence[Word], special: Mapping[str, int], pairs: Mapping[str, str]
) -> SentencePieceModel:
    """As SentencePiece has it. Raises ValueError unless the ids are 0, 1, 2, ..."""
    ordered = sorted(words, key=lambda word: word.index)
    if [word.index for word in ordered] != list(range(len(ordered))):
        raise ValueError("the ids of its tokens are not all whole numbers from 0 on")
    names = {index: text for text, index in special.items()}
    texts = [names.get(word.index) or word.text.decode() for word in ordered]
    has_bytes = sum(map(bool, map(_BYTE.fullmatch, texts))) == 256

    def kind(text: str) -> Kind:
        if text == _UNKNOWN:
            return Kind.UNKNOWN
        if text in special:
            return Kind.CONTROL
        return Kind.BYTE if has_bytes and _BYTE.fullmatch(text) else Kind.NORMAL

    return SentencePieceModel(
        [Piece(t, w.score or 0.0, kind(t)) for t, w in zip(texts, ordered, strict=True)],
        is_bpe=True,
        byte_fallback=has_bytes,
        precompiled_charsmap=b"",
        add_dummy_prefix=_is_true(pairs, "tokenizer_add_dummy_prefix", default=True),
        # The exporter writes it where the model does it; FastLLM does it too where nothing is written.
        remove_extra_whitespaces=_is_true(
            pairs, "tokenizer_remove_extra_whitespaces", default=False
        ),
    )


def _ranks(words: Sequence[Word], special: Sequence[str]) -> dict[bytes, int]:
    names = {text.encode() for text in special}
    ranks = {word.text: word.index for word in words if word.text not in names}
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("the ids of its tokens are not all whole numbers from 0 on")
    return ranks


def _is_true(pairs: Mapping[str, str], key: str, *, default: bool) -> bool:
    """As FastLLM's exporter writes it."""
    return pairs[key].lower() in ("1", "true") if key in pairs else default
