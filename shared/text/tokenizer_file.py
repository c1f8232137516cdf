"""A checkpoint's tokenizer: `tokenizer.json`, completed by the files beside it as transformers does, or another file.

`tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` name tokens that
`tokenizer.json` may lack, and a class that makes another tokenizer of the same vocabulary. All that
reads a tokenizer begins here, so every process has the same ids. Standard library only.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.bounded_file import LARGE, Bounds, bounds_of, read_value
from shared.text.cutting import cut
from shared.text.processor_tokens import added_by_processor
from shared.text.tokenizer_formats.other_files import convert, find_other

_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# For these transformers takes tokenizer.json as it is, whatever class stands beside it.
_AS_STORED = ("llava", "llava_next", "mistral", "qwen2")
_MOST_IDS = 1 << 24  # tables have an entry for each
_FLAGS = ("single_word", "lstrip", "rstrip")

Token = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """`content`: of a `tokenizer.json` with all tokens, each with the id that it gets.

    special_tokens: the text of those that have names ("bos_token", and those of the checkpoint's own), as templates
    know them.
    """

    content: dict[str, Any]
    special_tokens: dict[str, str]

    @property
    def text(self) -> str:
        """The content as the tokenizers library reads it."""
        return json.dumps(self.content)

    def special_id(self, name: str) -> int | None:
        """The id of a token with a name ("bos_token"), None where the tokenizer has none of that name."""
        return self.ids().get(self.special_tokens.get(name, ""))

    def ids(self) -> dict[str, int]:
        """The ids of added tokens, control tokens among them, by their texts."""
        return {token["content"]: token["id"] for token in self.content["added_tokens"]}


def read_tokenizer(path: Path) -> TokenizerFile:
    """Reads the `tokenizer.json` at `path` and the files beside it; where there is none, the folder's tokenizer in
    another format (`shared/text/tokenizer_formats`).

    Raises OSError or ValueError if one cannot be read.
    """
    try:
        return _read(path)
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}, or a file beside it, is no tokenizer's: {error!r}") from error


def _read(path: Path) -> TokenizerFile:
    other = None if path.is_file() else find_other(path.parent)
    content = json.loads(_converted(other)) if other else _object(path, LARGE)
    config = _config(path.parent)
    stored = _stored(content, path)
    base = stored
    if _is_llama(content, config, path.parent):
        _as_llama(content, config)
        base = []
    named = {name: _token(config[name], True) for name in _named_keys(config)}
    names = {token["content"] for token in named.values()}
    extra = [_token(value, True) for value in _extra(config)]
    special = names | {token["content"] for token in extra}
    tokens = {token["content"]: token for token in base}
    for token in _beside(path.parent, config, stored, special):
        if other and token["content"] in tokens:
            continue  # how a control token is found is known better where the file was converted
        token["special"] |= token["content"] in names
        tokens[token["content"]] = token
    for token in (*named.values(), *extra):
        tokens.setdefault(token["content"], {**token, "special": True})
    model, processor = (
        read_optional(path.parent / name) for name in ("config.json", "processor_config.json")
    )
    for text in added_by_processor(model, processor, has_pad="pad_token" in named):
        tokens.setdefault(text, _token(text, True))
    content["added_tokens"] = _numbered(content, tokens.values())
    own = config.get("extra_special_tokens")
    own = {name: _token(own[name]) for name in own} if isinstance(own, dict) else {}
    texts = {name: token["content"] for name, token in {**named, **own}.items()}
    return TokenizerFile(content, texts)


@lru_cache(maxsize=1)
def _converted(path: Path) -> str:
    """What `tokenizer.json` would hold. Kept, because a service reads its tokenizer twice."""
    folder = path.parent
    model, config = (
        read_optional(folder / name) for name in ("config.json", "tokenizer_config.json")
    )
    return json.dumps(convert(path, model, config, listed_ids(folder)))


def listed_ids(folder: Path) -> dict[int, str]:
    """The texts of tokens by the ids that files beside a tokenizer's give them: `added_tokens_decoder` of
    tokenizer_config.json, where there is none added_tokens.json. Raises ValueError, naming the file, for others."""
    path = folder / "tokenizer_config.json"
    listed = read_optional(path).get("added_tokens_decoder")
    try:
        if listed is not None:
            return {int(index): str(token["content"]) for index, token in listed.items()}
        path = folder / "added_tokens.json"
        return {int(index): text for text, index in read_optional(path).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: an added token is no text with an id: {error!r}") from None


def _config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the special tokens of older files where it lists no tokens."""
    config = read_optional(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_optional(folder / "special_tokens_map.json")
    return config


def _is_llama(content: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> bool:
    """Whether transformers makes a tokenizer of its class `LlamaTokenizer` from the vocabulary."""
    model = read_optional(folder / "config.json")
    kind = config.get("tokenizer_class") or model.get("tokenizer_class")
    return (
        kind in _LLAMA_CLASSES
        and model.get("model_type") not in _AS_STORED
        and (content.get("model") or {}).get("type") == "BPE"
        and '"ByteLevel"' not in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    )


def _as_llama(content: dict[str, Any], config: dict[str, Any]) -> None:
    """Keeps vocabulary, merges and what goes around a text; the rest is the class's own.

    A space is put before a text, unless `add_prefix_space` is false; with `legacy` also behind each
    control token, which is what a normalizer in tokenizer.json does.
    """
    for name, token in _LLAMA_NAMES.items():
        config.setdefault(name, token)
    prefix = config.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    behind = "always" if config.get("legacy") else "first"
    content["normalizer"] = None
    content["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": behind if prefix else "never",
        "split": False,
    }
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *(strip if prefix else []),
        ],
    }
    content["model"] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": content["model"]["vocab"],
        "merges": content["model"]["merges"],
    }


def _named_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of special tokens: the usual ones, and others that end alike ("image_token")."""
    own = [k for k, v in config.items() if k.endswith("_token") and isinstance(v, str)]
    return [*(n for n in _NAMES if _is_token(config.get(n))), *(k for k in own if k not in _NAMES)]


def _stored(content: Mapping[str, Any], path: Path) -> list[Token]:
    """The added tokens of tokenizer.json, which is at `path`. Raises ValueError for what is none."""
    listed = content.get("added_tokens") or []
    if not isinstance(listed, list) or not all(map(_has_id, listed)):
        raise ValueError(
            f"{path}: added_tokens must be a list of tokens, each with its text and id"
        )
    return listed


def _has_id(token: Any) -> bool:
    return isinstance(token, dict) and _is_text(token) and type(token.get("id")) is int


def _extra(config: Mapping[str, Any]) -> Iterable[Any]:
    """Special tokens without names, or with names of their own. Raises ValueError for what is none."""
    names = ("extra_special_tokens", "additional_special_tokens")
    name = next((name for name in names if config.get(name)), "")
    values = config.get(name) or []
    values = values.values() if isinstance(values, dict) else values
    if not isinstance(values, Iterable) or not all(map(_is_text, values)):
        files = "tokenizer_config.json or special_tokens_map.json"
        raise ValueError(
            f"{name} of {files} must hold tokens, each a text or an object with its content"
        )
    return values


def _is_text(token: Any) -> bool:
    return isinstance(token.get("content") if isinstance(token, dict) else token, str)


def _beside(
    folder: Path, config: Mapping[str, Any], stored: list[Token], special: set[str]
) -> list[Token]:
    """Tokens that files beside tokenizer.json list, ascending by the ids they give."""
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        return [_token(listed[index]) for index in sorted(listed, key=int)]
    older = {
        index: _token(text, text in special)
        for text, index in read_optional(folder / "added_tokens.json").items()
    }
    older |= {token["id"]: _token(token) for token in stored}
    return [older[index] for index in sorted(older)]


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _token(value: str | Mapping[str, Any], special: bool = False) -> Token:
    """A token as tokenizer.json lists it, yet without an id."""
    given = {"content": value} if isinstance(value, str) else value
    special = bool(given.get("special", special))
    return {
        "content": given["content"],
        **{flag: bool(given.get(flag, False)) for flag in _FLAGS},
        "normalized": bool(given.get("normalized", not special)),
        "special": special,
    }


def _numbered(content: Mapping[str, Any], tokens: Iterable[Token]) -> list[Token]:
    """With the ids that the tokenizers library gives, which are not always those that stand there:
    that of an equal entry of the vocabulary, otherwise the next one behind it.
    """
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < _MOST_IDS:
            raise ValueError(
                f"tokenizer.json: model.vocab gives {cut(token, 60)!r} the id {cut(str(index), 60)};"
                f" ids are whole numbers below {_MOST_IDS:,}"
            )
    behind = len(vocabulary)
    numbered = []
    for token in tokens:
        if not token["content"]:
            continue
        index = vocabulary.get(token["content"])
        if index is None:
            index, behind = behind, behind + 1
        else:
            behind = max(behind, index + 1)
        numbered.append({**token, "id": index})
    return numbered


def read_optional(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file. Raises ValueError for another content."""
    if not path.is_file():
        return {}
    return _object(path, bounds_of(path.name))


def _object(path: Path, bounds: Bounds) -> dict[str, Any]:
    content = read_value(path, bounds)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
