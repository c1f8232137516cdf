"""Byte-level BPE of GGUF files (`tokenizer.ggml.model` gpt2), as `tokenizers` has it.

How a text falls apart before anything is merged is said by a name, `tokenizer.ggml.pre`, of a tokenizer that
llama.cpp's converter knows. Source: `llama-vocab.cpp` of llama.cpp; where it writes an expression in another
way than the tokenizer.json of the models, here it is as these have it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

# What `tokenizer.ggml.token_type` says of tokens.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SIGNS_AND_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_SIGNS}{_REST}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_REST}"
_SEED = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_REST}"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _SIGNS_AND_SLASH + _REST
_GPT4O = _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?") + r"|\p{N}{1,3}" + _SIGNS_AND_SLASH + _REST
_IDEOGRAPHS = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_EAST_ASIAN = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST
)
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_DEFAULT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

_Step = pre_tokenizers.PreTokenizer


def _split(*expressions: str) -> Callable[[], list[_Step]]:
    return lambda: [*map(_isolated, expressions), _bytes()]


def _isolated(expression: str) -> _Step:
    return pre_tokenizers.Split(Regex(expression), "isolated")


def _bytes(words: bool = False) -> _Step:
    """words: text falls apart as that of GPT-2 does."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def _gpt2() -> list[_Step]:
    return [_bytes(words=True)]


def _digits() -> list[_Step]:
    return [pre_tokenizers.Digits(individual_digits=True), _bytes(words=True)]


def _falcon() -> list[_Step]:
    return [
        pre_tokenizers.Punctuation("contiguous"),
        _bytes(words=True),
        pre_tokenizers.Digits(individual_digits=False),
        _isolated("[0-9][0-9][0-9]"),
    ]


def _deepseek_llm() -> list[_Step]:
    parts = (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
        r"\s+$",
        _IDEOGRAPHS,
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    return [*map(_isolated, parts), digits, _bytes()]


def _deepseek_coder() -> list[_Step]:
    parts = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return [*map(_isolated, parts), digits, _bytes()]


def _viking() -> list[_Step]:
    return [_isolated(_BLOOM), pre_tokenizers.Digits(individual_digits=True), _bytes()]


@dataclass(frozen=True)
class Way:
    """How a text falls apart. `composes`: it is brought into Unicode's form NFC first; `whole_first`: a word that is a
    token is one, whatever is merged; `begins`: a text gets the token of its begin where the file does not say."""

    steps: Callable[[], list[_Step]]
    composes: bool = False
    whole_first: bool = False
    begins: bool = False


_AS_LLAMA3 = Way(_split(_LLAMA3), whole_first=True, begins=True)
_NAMES: Mapping[Way, Sequence[str]] = {
    _AS_LLAMA3: (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"
    ),
    Way(_split(_LLAMA3)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    Way(_split(_LLAMA3), whole_first=True): ("glm4",),
    Way(_split(_QWEN2), composes=True): ("qwen2", "megrez"),
    Way(_split(_QWEN2)): ("deepseek-r1-qwen", "stablelm2", "hunyuan", "kormo", "grok-2"),
    Way(_split(_QWEN35), composes=True): ("qwen35",),
    Way(_split(_SEED)): ("seed-coder",),
    Way(_split(_TEKKEN), whole_first=True, begins=True): ("tekken",),
    Way(_split(_GPT4O)): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    Way(_split(r"\p{N}{1,3}", _EAST_ASIAN, _DEEPSEEK3)): ("deepseek-v3", "hunyuan-dense"),
    Way(_deepseek_llm): ("deepseek-llm",),
    Way(_deepseek_coder): ("deepseek-coder",),
    Way(_gpt2): (
        "gpt-2", "phi-2", "mpt", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum",
    ),
    Way(_gpt2, composes=True): ("olmo",),
    Way(_digits): (
        "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"
    ),
    Way(_falcon): ("falcon",),
    Way(_split(_BLOOM)): ("bloom", "poro-chat", "gpt3-finnish"),
    Way(_viking): ("viking",),
    # Of old files, which have no name: as llama.cpp reads them.
    Way(_split(r"[\p{P}\$\+<=>\^~\|]+", _DEFAULT, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
}  # fmt: skip
WAYS: Mapping[str, Way] = {name: way for way, names in _NAMES.items() for name in names}


def byte_level(
    way: Way, tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str]
) -> Tokenizer:
    """Raises ValueError for merges that are none of its tokens. kinds: of each token, or none."""
    found = Tokenizer(
        BPE(
            {token: index for index, token in enumerate(tokens)},
            [_pair(merge) for merge in merges],
            ignore_merges=way.whole_first,
        )
    )
    if way.composes:
        found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.Sequence(way.steps())
    found.decoder = decoders.ByteLevel()
    add_tokens(found, tokens, kinds)
    return found


def add_tokens(found: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Those that are never taken apart, wherever they stand: control tokens, and others that somebody added."""
    control = [t for t, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    others = [t for t, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED]
    found.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    found.add_tokens([AddedToken(t, normalized=False) for t in others])


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second
