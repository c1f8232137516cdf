"""Which file of a folder without `tokenizer.json` has its tokenizer, and that tokenizer. Standard library only."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shared.text.tokenizer_formats import tiktoken
from shared.text.tokenizer_formats.content import Content, around
from shared.text.tokenizer_formats.ice_text import ice_text
from shared.text.tokenizer_formats.sentencepiece import sentencepiece
from shared.text.tokenizer_formats.sentencepiece_file import SentencePieceModel, read_sentencepiece

OTHER_TOKENIZERS = ("qwen.tiktoken", "ice_text.model", "tokenizer.model")
# ChatGLM2's and 3's control tokens follow the pieces of their model.
CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
# InternLM2's marks of turns, where no file gives their pieces other names: users write as little of them as of others.
_MARKS = ("[UNUSED_TOKEN_145]", "[UNUSED_TOKEN_146]")
_MOST_BEHIND = 1 << 16
_BEFORE_A_TEXT = ("[gMASK]", "sop")
# Classes whose own code begins a text so, where tokenizer_config.json does not say.
_BEGIN_CLASSES = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "InternLM2Tokenizer",
    "InternLM2TokenizerFast",
    "InternLMXComposer2Tokenizer",
)


def find_other(folder: Path) -> Path | None:
    """The file that `convert` reads, if there is one."""
    return next((folder / name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)


def convert(
    path: Path, model: Mapping[str, Any], tokenizer: Mapping[str, Any], listed: Mapping[int, str]
) -> Content:
    """The content of a `tokenizer.json` for a file that `find_other` found.

    `model` and `tokenizer` are the contents of config.json and tokenizer_config.json, which say whose file it is.
    `listed` are the texts that files beside it give ids. Raises ValueError, naming the file, for what cannot be used.
    """
    is_chatglm = model.get("model_type") == "chatglm"
    if path.name == "qwen.tiktoken":
        return tiktoken.qwen(tiktoken.read_ranks(path), has_vision="visual" in model)
    if path.name == "ice_text.model":
        offset = int(tokenizer.get("num_image_tokens", 20_000))
        return _converted(path, partial(ice_text, offset=offset))
    if tiktoken.is_tiktoken(path):
        if not is_chatglm:
            raise ValueError(f"{path}: a file of tiktoken is read for Qwen and GLM-4 alone")
        return tiktoken.glm4(tiktoken.read_ranks(path))
    return _converted(path, chatglm) if is_chatglm else _plain(path, tokenizer, listed)


def _plain(path: Path, tokenizer: Mapping[str, Any], listed: Mapping[int, str]) -> Content:
    """As stored; the token of a text's beginning goes before it where tokenizer_config.json or its class says so.

    A piece whose id is given to another text has that text, as by the converter that comes with InternLM2: its control
    tokens lie at pieces [UNUSED_TOKEN_...]. Ids behind the pieces are taken as they are given.
    """
    made = _converted(path, partial(sentencepiece, renamed=listed))
    for token in made["added_tokens"]:
        token["special"] |= token["content"] in _MARKS
    vocabulary = made["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary |= {text: index for index, text in listed.items() if index >= len(vocabulary)}
    else:
        _append(vocabulary, listed, path)
    begins = tokenizer.get("add_bos_token")
    if begins is None:
        begins = tokenizer.get("tokenizer_class") in _BEGIN_CLASSES
    given = tokenizer.get("bos_token") or "<s>"
    begin = given["content"] if isinstance(given, dict) else given
    ids = _ids(made)
    if begins and begin in ids:
        made["post_processor"] = around({begin: ids[begin]}, {})
    return made


def _append(vocabulary: list[Any], listed: Mapping[int, str], path: Path) -> None:
    """Puts the texts of ids behind the entries of a Unigram model [text, score] there. Raises ValueError for ids that
    are far behind."""
    end = max((index + 1 for index in listed), default=0)
    if end - len(vocabulary) > _MOST_BEHIND:
        raise ValueError(
            f"{path} has {len(vocabulary)} pieces, and a file beside it gives a token the id {end - 1}: at most"
            f" {_MOST_BEHIND} ids may follow"
        )
    never = min(
        (score for _, score in vocabulary), default=0.0
    )  # as control tokens, no text becomes one
    # Of an id without a text nothing else is known.
    vocabulary += [
        [listed.get(index, f"<unused_{index}>"), never] for index in range(len(vocabulary), end)
    ]


def chatglm(model: SentencePieceModel) -> Content:
    """ChatGLM2's and ChatGLM3's differ in the tokens of roles alone, which nobody writes to ChatGLM2."""
    made = sentencepiece(model, more=CHATGLM_TOKENS)
    ids = _ids(made)
    for token in made["added_tokens"]:
        token["single_word"] = token["content"] in ("sop", "eop")  # not in "isopropyl"
    return {**made, "post_processor": around({name: ids[name] for name in _BEFORE_A_TEXT}, {})}


def _converted(path: Path, make: Callable[[SentencePieceModel], Content]) -> Content:
    try:
        return make(read_sentencepiece(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _ids(made: Content) -> dict[str, int]:
    return {token["content"]: token["id"] for token in made["added_tokens"]}
