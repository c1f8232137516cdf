"""Token ids are those of AutoTokenizer, and guarded text holds no control token."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.text.guard import GUARD
from tests.support.tokenizers import byte_level_tokenizer, sentencepiece_like_tokenizer

TEXTS = [
    "The red circle stands left of the blue square.",
    "  two spaces\n\nand lines\t",
    "图中有一个红色的圆形 😀 naïve",
    "the the<s>the",
    "",
]
STYLES = ["byte level", "sentencepiece", "llama"]


def folder_of(style: str, folder: Path, **config: object) -> Path:
    byte_level = style == "byte level"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer() if byte_level else sentencepiece_like_tokenizer(),
        bos_token="<|endoftext|>" if byte_level else "<s>",
        eos_token="<|im_end|>" if byte_level else "</s>",
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    kind = {"tokenizer_class": "LlamaTokenizer"} if style == "llama" else {}
    path.write_text(json.dumps({**json.loads(path.read_text()), **kind, **config}))
    return folder


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
def test_ids_are_those_of_transformers(style: str, config: dict[str, bool], tmp_path: Path) -> None:
    folder = folder_of(style, tmp_path, **config)
    ours, theirs = PromptTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for add in (True, False):
            expected = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add).tolist() == expected, (text, add)
    assert ours.special_tokens["bos_token"] == theirs.bos_token
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
def test_pairs_and_cut_texts_are_those_of_transformers(
    style: str, config: dict[str, bool], tmp_path: Path
) -> None:
    folder = folder_of(style, tmp_path, **config)
    ours, theirs = PromptTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    first, *others = TEXTS[:3]
    for text in others:
        for add in (True, False):
            expected = theirs(first, text, add_special_tokens=add)["input_ids"]
            assert ours.encode(first, add, pair=text).tolist() == expected, (text, add)
            for most in (3, 7, 1000):
                options = {"add_special_tokens": add, "truncation": True, "max_length": most}
                expected = theirs(text, **options)["input_ids"]
                assert ours.encode(text, add, most=most).tolist() == expected, (text, add, most)


@pytest.mark.parametrize("style", STYLES)
def test_guarded_text_keeps_its_words_without_control_tokens(style: str, tmp_path: Path) -> None:
    folder = folder_of(style, tmp_path)
    ours, theirs = PromptTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    special = theirs.bos_token
    assert ours.guard("plain words") == "plain words"
    for text in (
        f"the {special} cat",
        f"{special}{special}",
        f"a{special[0]}{special}{special[1:]}b",
    ):
        guarded = ours.guard(text)
        ids = ours.encode(guarded, add_special_tokens=False).tolist()
        assert not set(ids) & set(theirs.all_special_ids), text
        assert theirs.decode(ids) == text
        assert ours.guard(guarded) == guarded  # what a user wrote of it means nothing
        assert guarded.replace(GUARD, "") == text
    halves = [f"a {special[:3]}", f"{special[3:]} b"] if len(special) > 3 else ["a <s", "> b"]
    joined = "".join(ours.guard_parts(halves))
    assert not set(ours.encode(joined, False).tolist()) & set(theirs.all_special_ids)


def test_only_the_marker_is_guarded_in_plain_prompts(tmp_path: Path) -> None:
    folder = folder_of("byte level", tmp_path)
    ours, theirs = PromptTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ours.protect("<image>")
    ids = ours.encode(ours.guard_marker("<|im_start|>see <image>"), False).tolist()
    assert theirs.convert_tokens_to_ids("<|im_start|>") in ids
    assert theirs.convert_tokens_to_ids("<image>") not in ids
    assert theirs.decode(ids) == "<|im_start|>see <image>"
