"""Tokenizers that are made of GGUF files give the tokens of those that the files were made of."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import sentencepiece
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer

from shared.checkpoint.gguf.byte_level import CONTROL, USER_DEFINED, WAYS, byte_level

_LEARNED = (
    "Hello world, don't and I'LL, we've 12345 3.14\n\n    indented = value  # 日本語のテキスト 你好，世界！\n"
    "Привет мир, как дела? café naïve ñandú <html> x==1; {'a': [1, 2]}\r\n\tTab ...!!! end. "
)
TEXTS = [
    "",
    "Hello world",
    "  two spaces  in   the middle ",
    " leading",
    "a\n\nb\n\n\n c\t\td \r\n",
    "don't I'LL we've 12345 3.14159 1000000",
    "日本語テキスト 你好，世界！ คนไทย العربية עברית",
    "emoji 🙂👩\u200d👩\u200d👧 🚀🌫️",
    "\x00\x01\x7f control \u2028 sep \U0010ffff",
    "cafe\u0301 ﬁ ① Ⅷ ½ 𝒳",
    "<|user|>hi<|end|> <think> x",
    "if x == 1:\n        return  2  # ok",
]
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NO_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(*expressions: str) -> list[pre_tokenizers.PreTokenizer]:
    parts = [pre_tokenizers.Split(Regex(found), "isolated") for found in expressions]
    return [*parts, _NO_WORDS]


# As tokenizer.json of the models has them whose kind llama.cpp calls so.
THEIRS: Mapping[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [_WORDS],
    "starcoder": [pre_tokenizers.Digits(individual_digits=True), _WORDS],
    "qwen2": split(rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}"),
    "llama-bpe": split(rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}"),
    "deepseek-v3": split(
        r"\p{N}{1,3}",
        r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_byte_level_tokens_are_those_of_the_tokenizer(name: str) -> None:
    theirs = Tokenizer(BPE(ignore_merges=WAYS[name].whole_first))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(THEIRS[name])
    if name == "qwen2":
        theirs.normalizer = normalizers.NFC()
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator([_LEARNED] * 4, trainer)
    # Signs that no byte is written as: in the vocabulary of a file they stand as they are.
    special = ["<|user|>", "<|end|>", "<｜end▁of▁sentence｜>"]
    theirs.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    theirs.add_tokens([AddedToken("<think>", normalized=False)])
    words = json.loads(theirs.to_str())
    ids = {index: text for text, index in theirs.get_vocab(with_added_tokens=True).items()}
    tokens = [ids[index] for index in range(len(ids))]
    kinds = [
        CONTROL if text in special else USER_DEFINED if text == "<think>" else 1 for text in tokens
    ]
    made = byte_level(WAYS[name], tokens, kinds, [" ".join(m) for m in words["model"]["merges"]])
    for text in [*TEXTS, "x<｜end▁of▁sentence｜>y"]:
        found = made.encode(text).ids
        assert found == theirs.encode(text).ids, text
        assert made.decode(found, skip_special_tokens=False) == theirs.decode(
            found, skip_special_tokens=False
        )


def learn(folder: Path, prefix: bool, own: Sequence[str]) -> sentencepiece.SentencePieceProcessor:
    (folder / "text").write_text(_LEARNED * 40)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=list(own),
        allow_whitespace_only_pieces=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def write_pieces(
    path: Path, architecture: str, pieces: sentencepiece.SentencePieceProcessor, own: Sequence[str]
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    ids = range(pieces.vocab_size())
    texts = [pieces.id_to_piece(index) for index in ids]
    writer.add_token_list([t.replace("▁", " ") if t in own else t for t in texts])
    writer.add_token_scores(
        [-1000.0 if t in own else pieces.get_score(i) for i, t in zip(ids, texts, strict=True)]
    )
    kinds = [
        6
        if pieces.is_byte(index)
        else 2
        if pieces.is_unknown(index)
        else CONTROL
        if pieces.is_control(index)
        else USER_DEFINED
        if text in own
        else 1
        for index, text in zip(ids, texts, strict=True)
    ]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    if architecture.startswith("gemma"):
        writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def made_of(file: Path, folder: Path) -> Tokenizer:
    folder.mkdir()
    program = [sys.executable, "-P", "-m", "shared.checkpoint.gguf.tokenizer_files"]
    done = subprocess.run([*program, str(file), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_pieces_of_llama_are_those_of_sentencepiece(tmp_path: Path) -> None:
    pieces = learn(tmp_path, True, ())
    write_pieces(tmp_path / "some.gguf", "llama", pieces, ())
    made = made_of(tmp_path / "some.gguf", tmp_path / "made")
    for text in TEXTS[1:]:
        found = made.encode(text)
        assert found.ids == [2, *pieces.encode(text)], text
        assert made.decode(found.ids) == text


def test_pieces_of_gemma_are_those_of_its_tokenizer(tmp_path: Path) -> None:
    own = ("<start_of_turn>", "<end_of_turn>", "▁▁", "▁▁▁", "▁▁▁▁", "\n", "\n\n")
    pieces = learn(tmp_path, False, own)
    write_pieces(tmp_path / "some.gguf", "gemma2", pieces, own)
    made = made_of(tmp_path / "some.gguf", tmp_path / "made")
    theirs = GemmaTokenizer.from_pretrained(tmp_path, add_bos_token=True)
    for text in [*TEXTS, "<start_of_turn>user\nhi<end_of_turn>\n"]:
        assert made.encode(text).ids == theirs(text).input_ids, text
