"""Tokenizers equal AutoTokenizer for every combination of files in a folder: ids, and text of ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.text.text_fold import TokenBytes
from shared.text.tokenizer_file import read_tokenizer
from tests.support.tokenizers import byte_level_tokenizer, sentencepiece_like_tokenizer

TEXTS = [
    "the the  is",
    " the<s>the</s> the<s> is\nthe",
    "<s><s>the",
    "图中有一个红色的圆形 😀 the",
    "<|tool|> the<|tool|>the word theword word",
    "the <extra> is<extra>is [PAD] x[PAD]",
    "",
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False}
WORD = {"content": "word", "normalized": True, "special": False, **PLAIN}
TOOL = {"content": "<|tool|>", "normalized": False, "special": True, **PLAIN}
LISTED = {
    str(index): {"content": name, "normalized": False, "special": True, **PLAIN}
    for index, name in enumerate(("<unk>", "<s>", "</s>"))
}


def sentencepiece(*more: str) -> dict[str, Any]:
    """tokenizer.json in the style of Llama 2, with more entries in its vocabulary."""
    tokenizer = sentencepiece_like_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for token in more:
        vocabulary[token] = len(vocabulary)
    return content


def byte_level() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(byte_level_tokenizer().to_str())
    return content


def with_added(content: dict[str, Any], token: dict[str, Any], index: int | None) -> dict[str, Any]:
    """Lists a token, by itself or under the id of another."""
    behind = Tokenizer.from_str(json.dumps(content)).get_vocab_size()
    content["added_tokens"].append({"id": behind if index is None else index, **token})
    return content


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def check(folder: Path) -> None:
    ours, theirs = PromptTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    table = TokenBytes.from_tokenizer_json(folder / "tokenizer.json")
    assert ours.vocab_size == len(theirs) == len(table)
    assert ours.special_tokens == theirs.special_tokens_map
    for text in TEXTS:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add).tolist() == ids, (text, theirs.convert_ids_to_tokens(ids))
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert table.text(ids, skip_special_tokens=skip) == expected, (text, skip)
    for index in range(len(theirs)):
        if not theirs.convert_ids_to_tokens(index).startswith("<0x"):
            expected = theirs.decode([259, index], skip_special_tokens=False)
            assert table.text([259, index], skip_special_tokens=False) == expected, index


@pytest.mark.parametrize("config", [{}, {"legacy": False}, {"legacy": True},
                                    {"legacy": None}, {"add_prefix_space": False},
                                    {"bos_token": None, "eos_token": None},
                                    {"legacy": True, "added_tokens_decoder": LISTED}])  # fmt: skip
@pytest.mark.parametrize("model_type", ["llama", "mistral", "llava", "qwen3"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "TokenizersBackend"])
def test_llama_tokenizers(
    tmp_path: Path, name: str, model_type: str, config: dict[str, Any]
) -> None:
    files = {
        "tokenizer": sentencepiece("▁word"),
        "tokenizer_config": {"tokenizer_class": name, **NAMES, **config},
        "config": {"model_type": model_type},
    }
    check(write(tmp_path, files))


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "LlamaTokenizer"}])
def test_llama_tokenizers_under_other_class_names(tmp_path: Path, config: dict[str, Any]) -> None:
    files = {"tokenizer": sentencepiece(), "tokenizer_config": config}
    check(write(tmp_path, {**files, "config": {"model_type": "llama", **config}}))


@pytest.mark.parametrize("name", ["LlamaTokenizer", "TokenizersBackend"])
@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {**LISTED, "400": TOOL, "401": WORD}}},
        {"tokenizer_config": {"added_tokens_decoder": {"400": {**TOOL, "special": False}}}},
        {"tokenizer_config": {"pad_token": "[PAD]", "extra_special_tokens": ["<extra>"]}},
        {"tokenizer_config": {"additional_special_tokens": ["<|tool|>"], "tool_token": "<extra>"}},
        {"tokenizer_config": {"extra_special_tokens": {"tool_token": "<|tool|>"}}},
        {"added_tokens": {"<|tool|>": 401, "word": 400}},
        {"added_tokens": {"<|tool|>": 400}, "special_tokens_map": {"pad_token": "<|tool|>"}},
        {
            "special_tokens_map": {
                "pad_token": {"content": "[PAD]", "normalized": False, **PLAIN},
                "additional_special_tokens": ["<extra>"],
            }
        },
    ],
)
def test_tokens_that_other_files_know(tmp_path: Path, name: str, files: dict[str, Any]) -> None:
    config = {"tokenizer_class": name, **NAMES, **files.get("tokenizer_config", {})}
    files = {"tokenizer": sentencepiece(), **files, "tokenizer_config": config}
    check(write(tmp_path, {**files, "config": {"model_type": "llama"}}))


@pytest.mark.parametrize("value", [True, 3, [None], [{}], {"a": 1}, [{"content": []}]], ids=str)
def test_what_is_no_token_is_refused_by_its_field(tmp_path: Path, value: Any) -> None:
    config = {"tokenizer_config": {"extra_special_tokens": value}}
    folder = write(tmp_path, {"tokenizer": byte_level(), **config})
    with pytest.raises(ValueError, match=r"^extra_special_tokens of tokenizer_config\.json"):
        read_tokenizer(folder / "tokenizer.json")
    folder = write(tmp_path, {"tokenizer": {**byte_level(), "added_tokens": value}})
    with pytest.raises(ValueError, match=r"tokenizer\.json: added_tokens must be a list"):
        read_tokenizer(folder / "tokenizer.json")


def test_byte_level_files_of_a_llama_tokenizer_are_taken_as_they_are(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "pad_token": "[PAD]", "eos_token": "<|im_end|>"}
    files = {"tokenizer": byte_level(), "tokenizer_config": config}
    check(write(tmp_path, {**files, "config": {"model_type": "llama"}}))


@pytest.mark.parametrize("name", ["LlamaTokenizer", "TokenizersBackend"])
@pytest.mark.parametrize("more", [(), ("▁word",), ("word",), ("▁word", "word")])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_an_added_normalized_token_keeps_its_space(
    tmp_path: Path, name: str, more: tuple[str, ...], shared: bool, special: bool
) -> None:
    content = sentencepiece(*more)
    index = content["model"]["vocab"].get("▁word") if shared else None
    files = {
        "tokenizer": with_added(content, {**WORD, "special": special}, index),
        "tokenizer_config": {"tokenizer_class": name, **NAMES},
        "config": {"model_type": "llama"},
    }
    check(write(tmp_path, files))
