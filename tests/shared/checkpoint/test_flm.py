"""`tessera convert flm`: FastLLM's files as folders that are served, and what is refused."""

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from services.gateway.reading.sampling.bad_words import read_bad_words
from services.launcher import cli
from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.checkpoint.conversion import written_file
from shared.checkpoint.conversion.flm.convert import convert_flm
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.text_fold import TokenBytes
from tests.support import flm
from tests.support.chat_templates import chat_template
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)
from tests.support.flm import TRIE, Flm, Words, reference_ids
from tests.support.tokenizers import SENTENCES, byte_level_tokenizer, sentencepiece_like_tokenizer

KINDS = (
    *(flm.FLOAT32, flm.BFLOAT16, flm.FLOAT16),
    *(flm.INT8, flm.INT4, flm.INT4_NO_ZERO, flm.INT4_GROUP),
)
CHATML = {
    "pre_prompt": '<|im_start|>system\nBe "brief".<|im_end|>',
    "user_role": "<|im_start|>user\n",
    "bot_role": "<|im_end|><|im_start|>assistant\n",
    "history_sep": "<|im_end|>\n",
}


def words_with_scores() -> Words:
    """Of a Llama-2, as FastLLM's exporter writes what it reads of tokenizer.json."""
    content = json.loads(sentencepiece_like_tokenizer().to_str())["model"]
    ranks = {"".join(pair): -float(rank) for rank, pair in enumerate(content["merges"])}
    return [(t.encode(), index, ranks.get(t, 1.0)) for t, index in content["vocab"].items()]


def words_of_bytes() -> Words:
    """Of a Qwen2."""
    tokenizer = byte_level_tokenizer()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    ranks = {"".join(pair): -float(rank) for rank, pair in enumerate(merges)}
    return [(t.encode(), i, ranks.get(t, 1.0)) for t, i in tokenizer.get_vocab().items()]


SOME = words_with_scores()


def example(**changes: Any) -> Flm:
    """A small Llama with every type of tensor."""
    draw = np.random.default_rng(0)
    tensors = {
        f"model.t{kind}.weight": flm.tensor(draw.normal(size=(6, 10)).astype(np.float32), kind)
        for kind in KINDS
    }
    odd = draw.normal(size=(3, 5)).astype(np.float32)
    tensors["odd"] = flm.tensor(odd, flm.INT4)
    tensors["columns"] = flm.tensor(odd, flm.INT8, axis=1)
    tensors["whole"] = flm.tensor(odd, flm.INT8, axis=-1)
    tensors["ragged"] = flm.tensor(odd, flm.INT4_GROUP, width=2)
    pairs = {
        "model_type": "llama",
        "vocab_size": "400",
        "hidden_act": "silu",
        "tokenizer_use_score": "1",
    }
    return Flm(**{"pairs": pairs, "words": SOME, "tensors": tensors, **changes})


def run(source: Path, target: Path, *more: str) -> int:
    return cli.run(["convert", "flm", str(source), str(target), *more])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", None])
def test_each_type_of_tensor_comes_back(
    tmp_path: Path, dtype: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = example()
    options = ["--dtype", dtype] if dtype else []
    assert run(file.write(tmp_path / "m.flm"), tmp_path / "out", *options) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == file.tensors.keys()
    kind = getattr(torch, dtype or "float16")
    for name, tensor in file.tensors.items():
        assert found[name].dtype == kind and found[name].shape == tensor.shape
        scale = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[kind]
        expected = torch.from_numpy(tensor.values)
        torch.testing.assert_close(found[name].float(), expected, rtol=scale, atol=scale)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 400
    assert capsys.readouterr().out.startswith("[1/1] model.safetensors: 11 tensors")


def test_large_files_are_sharded_and_blocks_of_rows_change_nothing(tmp_path: Path) -> None:
    source = example().write(tmp_path / "m.flm")
    assert run(source, tmp_path / "whole", "--dtype", "float32") == 0
    convert_flm(source, tmp_path / "parts", "float32", shard_bytes=300, block=7)
    whole, parts = Checkpoint(tmp_path / "whole"), Checkpoint(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 3
    assert sorted(whole.names()) == sorted(parts.names())
    for name in whole.names():
        assert torch.equal(whole.tensor(name), parts.tensor(name))


@pytest.fixture(scope="module")
def trie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trie")
    pairs = {"model_type": "llama", "vocab_size": "400", "bos_token_id": "1", "eos_token_id": "2"}
    source = example(pairs=pairs, words=TRIE, version=1).write(folder / "m.flm")
    assert run(source, folder / "out") == 0
    return folder / "out"


@given(
    st.lists(
        st.sampled_from(
            [*(w.decode("utf-8", "ignore") for w, _, _ in TRIE[5:]), " ", "\n", "\t", "国", "Q"]
        )
    )
)
def test_the_longest_token_is_taken_as_by_a_plain_reference(trie: Path, parts: list[str]) -> None:
    text = "".join(parts).replace("▁", " ")
    while "  " in text:
        text = text.replace("  ", " ")
    seen = text.replace(" ", "▁").replace("\n", "<n>").replace("\t", "<|tab|>")
    expected = reference_ids(TRIE, seen.encode())
    tokenizer = _tokenizer(trie)
    if expected is None:
        with pytest.raises(InvalidRequest, match="no token"):
            tokenizer.encode(text, False)
        return
    assert tokenizer.encode(text, False).tolist() == expected
    assert tokenizer.encode(text, True).tolist() == [1, *expected]
    assert TokenBytes.from_tokenizer_json(trie / "tokenizer.json").text(expected) == text


_tokenizer = cache(PromptTokenizer)


def test_a_bad_word_without_tokens_is_refused(trie: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trie / "tokenizer.json"))
    (found,) = read_bad_words("zx", tokenizer)
    assert found.ids == reference_ids(TRIE, b"zx")
    with pytest.raises(InvalidRequest, match="has no tokens"):
        read_bad_words("国", tokenizer)


@pytest.mark.full
def test_a_vocabulary_of_size_is_matched_in_no_time_that_grows_with_the_square(
    tmp_path: Path,
) -> None:
    """60,000 tokens and a text of 200,000 bytes: WordPiece's way would not end."""
    draw = np.random.default_rng(1)
    letters = np.array([*b"abcdefgh"], np.uint8)
    texts = {bytes([byte]) for byte in range(32, 127)} | {b"\n"}
    while len(texts) < 60_000:
        texts.add(draw.choice(letters, draw.integers(2, 12)).tobytes())
    words: Words = [(text, index, None) for index, text in enumerate(sorted(texts))]
    pairs = {"model_type": "llama", "vocab_size": "60000"}
    assert run(example(pairs=pairs, words=words).write(tmp_path / "m.flm"), tmp_path / "out") == 0
    tokenizer = PromptTokenizer(tmp_path / "out")
    text = draw.choice(letters, 200_000).tobytes()
    found = tokenizer.encode(text.decode(), False).tolist()
    by_id = {index: word for word, index, _ in words}
    assert b"".join(by_id[index] for index in found) == text
    assert found[:100] == (reference_ids(words, text[:2000]) or [])[:100]


def test_scores_are_those_of_byte_pair_encoding(tmp_path: Path) -> None:
    theirs = sentencepiece_like_tokenizer()
    pairs = example().pairs | {"tokenizer_add_dummy_prefix": "True", "bos_token_id": "1"}
    assert run(example(pairs=pairs).write(tmp_path / "m.flm"), tmp_path / "out") == 0
    ours = PromptTokenizer(tmp_path / "out")
    table = TokenBytes.from_tokenizer_json(tmp_path / "out" / "tokenizer.json")
    for text in [*SENTENCES, "This is the thesis", "  the  the"]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, False).tolist() == ids
        assert ours.encode(text, True).tolist() == [1, *ids]
        assert table.text(ids) == text


@pytest.mark.parametrize("is_scored", [False, True])
def test_the_control_tokens_of_chatglm_follow_its_vocabulary(
    tmp_path: Path, is_scored: bool
) -> None:
    words = SOME if is_scored else TRIE
    score = {"tokenizer_use_score": "1", "tokenizer_add_dummy_prefix": "False"} if is_scored else {}
    pairs = {"model_type": "chatglm", "padded_vocab_size": "400", **score}
    file = example(pairs=pairs, words=words)
    assert run(file.write(tmp_path / "m.flm"), tmp_path / "out") == 0
    ids = PromptTokenizer(tmp_path / "out").encode("the<|user|>", True).tolist()
    the = next(index for word, index, _ in words if word == b"the")
    assert ids == [len(words) + 1, len(words) + 3, the, len(words) + 6]


@pytest.mark.full
def test_the_control_tokens_of_internlm2_lie_at_pieces_without_use(tmp_path: Path) -> None:
    words = [*SOME, *((b"[UNUSED_TOKEN_%d]" % n, n, -1e4) for n in range(len(SOME), 92_544))]
    pairs = {"model_type": "internlm2", "vocab_size": "92544", "tokenizer_use_score": "1"}
    pairs |= {"tokenizer_has_special_tokens": "1", "bos_token_id": "1", "eos_token_id": "92542"}
    file = example(pairs=pairs, words=words, special_tokens=["<|im_start|>", "</s>"])
    assert run(file.write(tmp_path / "m.flm"), tmp_path / "out") == 0
    ids = PromptTokenizer(tmp_path / "out").encode("<|im_start|><|im_end|>", True).tolist()
    assert ids == [1, 92_543, 92_542]
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "<|im_end|>")


def test_glm4_has_its_own_tokenizer(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    words: Words = [(word, index, 1.0) for word, index in ranks.items()]
    words += [(b"<|endoftext|>", 258, 1.0), (b"<|user|>", 265, 1.0)]
    pairs = {
        "model_type": "chatglm",
        "tokenizer_class": "GLM4Tokenizer",
        "tokenizer_use_score": "1",
    }
    file = example(pairs=pairs, words=words)
    assert run(file.write(tmp_path / "m.flm"), tmp_path / "out") == 0
    ids = PromptTokenizer(tmp_path / "out").encode("<|user|>the", True).tolist()
    assert ids == [260, 262, 265, 257]


def test_prompts_of_the_file_become_a_chat_template(tmp_path: Path) -> None:
    file = qwen2(example().tensors)
    assert run(file.write(tmp_path / "m.flm"), tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    template = chat_template(config["chat_template"], {})
    talk = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in talk]
    begin, user, answer, end = CHATML.values()
    assert template.render(messages, True) == f"{begin}{user}a{answer}b{end}{user}c{answer}"
    theirs, ours = byte_level_tokenizer(), PromptTokenizer(tmp_path / "out")
    ids = theirs.encode("<|im_start|>user\nred", add_special_tokens=False).ids
    assert ours.encode("<|im_start|>user\nred", False).tolist() == ids


def qwen2(tensors: Any, **pairs: str) -> Flm:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pairs = {
        "model_type": "qwen2",
        "vocab_size": "520",
        "tokenizer_byte_as_char": "True",
        "tokenizer_use_score": "1",
        "tokenizer_has_special_tokens": "1",
        **CHATML,
        **pairs,
    }
    return Flm(pairs, words_of_bytes(), tensors, special)


def exported(folder: Path, family: str, kind: int) -> Flm:
    """A checkpoint as FastLLM's exporter writes it: matrices in a type, the rest as float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = flm.tensors(folder, kind)
    pairs = {key: str(value) for key, value in config.items()}
    if family == "qwen2":
        return qwen2(tensors, **pairs)
    if family == "qwen":
        words: Words = [(bytes([byte]), byte, 1.0) for byte in range(256)]
        pairs |= {"chat_format": "chatml", "im_end_id": "258", "im_start_id": "257"}
        return Flm(pairs | {"tokenizer_use_score": "1"}, words, tensors)
    if family == "internlm2":
        return Flm(pairs, TRIE, tensors)
    return Flm(pairs | {"tokenizer_use_score": "1"}, SOME, tensors)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", flm.INT4_NO_ZERO),
        ("qwen2", flm.INT8),
        ("llama", flm.FLOAT32),
        ("chatglm", flm.FLOAT32),
        ("internlm2", flm.FLOAT32),
        ("qwen", flm.FLOAT32),
    ],
)
async def test_the_decoder_gives_the_tokens_of_transformers(
    tmp_path: Path, short_tmp: Path, family: str, kind: int
) -> None:
    """On the same weights: those of the folder that was made, or those the file was made of."""
    source = make_checkpoint(tmp_path / "source", family)
    out = tmp_path / "out"
    file = exported(source, family, kind).write(tmp_path / "m.flm")
    assert run(file, out, "--dtype", "float32") == 0
    saved = source / "saved_by_transformers"
    same = saved if saved.exists() else (source if kind == flm.FLOAT32 else out)
    model = AutoModelForCausalLM.from_pretrained(same, dtype=torch.float32)
    prompt = PromptTokenizer(out).encode("the red\nthe", True).tolist()
    assert prompt
    async with (
        running_decoder(out, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        text = Text(0, prompt, greedy())
        await NaiveScheduler(stream).generate([text], 12, chunk=16)
    tokens, logits = greedy_tokens(model, prompt, 12)
    assert_same_up_to_ties(text.output, tokens, logits)


def change(name: str, data: bytes, shape: tuple[int, ...] = (2, 2)) -> Flm:
    return example(tensors={name: flm.FlmTensorFile(shape, data, np.zeros(0, np.float32))})


def plain(**pairs: str) -> Flm:
    return example(pairs=example().pairs | pairs)


def unscored(words: Words) -> Flm:
    return example(pairs={"model_type": "llama", "vocab_size": "5000"}, words=words)


QUANTIZED = struct.pack("<ii", flm.INT8, 0)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"", "the file is empty"),
        (b"GGUF" + bytes(100), "this is no .flm that is known, at byte 0"),
        (flm.number(2) + flm.number(1 << 30), "1073741824 pairs do not fit"),
        (flm.number(2) + flm.number(-1) + bytes(8), "-1 pairs do not fit into the file, at byte 4"),
        (
            flm.number(2) + flm.number(1) + flm.number(1) + b"\xff" + bytes(20),
            "not UTF-8, at byte 8",
        ),
        (example().to_bytes() + b"\0", "1 bytes follow the last tensor"),
        (change("w", flm.number(2)), "'w' is of type 2, which is not read"),
        (
            change("w", flm.number(0), (1 << 30, 1 << 30, 1 << 30)),
            "the file ends within tensor 'w'",
        ),
        (change("w", flm.number(0), (2, -2)), "'w' has the shape (2, -2)"),
        (change("w", flm.number(0), (1,) * 9), "'w' has 9 dimensions"),
        (change("w", struct.pack("<ii", 3, 2)), "quantized along axis 2"),
        (change("w", struct.pack("<iiii", 9, 0, 3, 1)), "3 groups of 1"),
        (change("w", QUANTIZED + struct.pack("<4f", 1, 0, 0, 1) + bytes(4)), "'w' has a range"),
        (
            change("w", QUANTIZED + struct.pack("<4f", 0, float("nan"), 0, 1) + bytes(4)),
            "'w' has a",
        ),
        (change("w", flm.number(0) + struct.pack("<4f", 1, 2, 3, 1e30)), "'w' has values that"),
        (example(words=[*SOME, SOME[0]]), "there twice, at byte"),
        (example(words=[*SOME, (b"new", 1000, 0.0)]), "not all whole numbers"),
        (example(words=[]), "it has no vocabulary"),
        (example(tensors={}), "it has no tensors"),
        (plain(vocab_size="100"), "the model has 100 rows"),
        (plain(model_type="moss"), "model_type 'moss' is none of chatglm"),
        (plain(model_type="chatglm", position_encoding_2d="True"), "position_encoding_2d 'True'"),
        (plain(quantization_config="GPTQConfig()"), "quantization_config"),
        (plain(model_type="chatglm", quantization_bit="4"), "quantization_bit '4'"),
        (unscored([(b"a" * n, n, None) for n in range(1, 2000)]), "tokens begin one another"),
        (unscored([(b"b", 0, None)]), "its vocabulary makes no tokenizer"),
        (unscored([(b" a", 0, None), ("▁a".encode(), 1, None)]), "0 and 1 are both b' a'"),
        (plain(user_role="<FLM_FIX_TOKEN_77>"), "the token 77"),
        (plain(peft_size="x"), "peft_size is 'x'"),
        (
            example(pairs=example().pairs | {"peft_size": "1"}, adapters={"lora": {"r": "8"}}),
            "it has adapters (lora)",
        ),
    ],
)
def test_what_is_refused_leaves_nothing_behind(
    tmp_path: Path, file: Flm | bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "m.flm"
    source.write_bytes(file if isinstance(file, bytes) else file.to_bytes())
    assert run(source, tmp_path / "out") == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


def test_a_file_that_is_cut_anywhere_is_refused_by_offset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words: Words = [(b"a", 0, 0.0), (b"<unk>", 1, 0.0)]
    whole = example(words=words).to_bytes()
    source = tmp_path / "m.flm"
    for size in range(1, len(whole), 7):
        source.write_bytes(whole[:size])
        assert run(source, tmp_path / "out") == 1
        assert ", at byte " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_refused_or_read_but_never_fails_otherwise(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    data = bytearray(example(words=SOME[:300]).to_bytes())
    for at, byte in damage:
        data[at % len(data)] = byte
    (folder / "m.flm").write_bytes(data)
    assert run(folder / "m.flm", folder / "out") == (0 if (folder / "out").exists() else 1)


def test_a_difference_is_reported_by_the_tensors_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save: Callable[..., None] = save_file

    def save_wrongly(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        save({name: tensor * (name != "odd") for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(written_file, "save_file", save_wrongly)
    assert run(example().write(tmp_path / "m.flm"), tmp_path / "out") == 1
    assert "is not what was written to it: odd" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
