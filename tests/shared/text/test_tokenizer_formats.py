"""Tokenizers in other files than tokenizer.json give the ids and the text of the libraries that wrote them."""

import base64
import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken._educational import bpe_train
from tokenizers import Tokenizer
from tokenizers.models import BPE

from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.errors import InvalidRequest
from shared.text.text_fold import TokenBytes
from shared.text.tokenizer_formats.merges import merges
from tests.support.tokenizers import SENTENCES, trained_sentencepiece

TEXTS = [
    *SENTENCES,
    "The red circle",
    "  two  blanks",
    "aaaa aaaaaaaa baaab",
    "a\n\n\tb     c",
    "isopropyl 2026 1234567",
    "ﬁne Å naïve",
    "🙂🙃 𝕊",
    "\n leading",
]


def trained(path: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model of all texts here."""
    return trained_sentencepiece(path, [*SENTENCES, *TEXTS] * 20, **options)


def write(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def words(folder: Path) -> tuple[PromptTokenizer, TokenBytes]:
    return PromptTokenizer(folder), TokenBytes.from_tokenizer_json(folder / "tokenizer.json")


LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "add_dummy_prefix": True,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}


@pytest.mark.parametrize(
    "options",
    [
        LLAMA,
        {**LLAMA, "byte_fallback": False},
        {**LLAMA, "add_dummy_prefix": False},
        {**LLAMA, "user_defined_symbols": ["<tool>", "<x>"]},
        {"model_type": "bpe"},
        {"model_type": "unigram"},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nfkc"},
        {"model_type": "unigram", "user_defined_symbols": ["<n>", "circle"]},
    ],
)
def test_a_sentencepiece_model_gives_its_ids_and_text(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    theirs = trained(tmp_path / "tokenizer.model", **options)
    write(tmp_path, {"model_type": "internlm2"}, {"add_bos_token": True})
    ours, table = words(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, False).tolist() == ids, text
        assert ours.encode(text, True).tolist() == [theirs.bos_id(), *ids]
        if theirs.unk_id() not in ids:
            assert table.text(ids) == theirs.decode(ids)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptTokenizer, Any]:
    folder = tmp_path_factory.mktemp("llama")
    theirs = trained(folder / "tokenizer.model", **LLAMA)
    write(folder, {}, {})
    return words(folder)[0], theirs


@given(text=st.text(alphabet="abcdehilrst  ue图个红圆", max_size=40))
def test_drawn_texts_of_a_sentencepiece_model(
    llama: tuple[PromptTokenizer, Any], text: str
) -> None:
    ours, theirs = llama
    assert ours.encode(text, False).tolist() == theirs.encode(text)


@pytest.mark.parametrize("text", ["[gMASK]sop<|user|>\n hello", "[Round 1]\n\n问：hi\n\n答："])
def test_chatglm2_and_3_have_control_tokens_behind_their_model(tmp_path: Path, text: str) -> None:
    theirs = trained(tmp_path / "tokenizer.model", **LLAMA)
    listed = {"64790": {"content": "[gMASK]"}, "64792": {"content": "<|user|>", "special": True}}
    write(tmp_path, {"model_type": "chatglm"}, {"added_tokens_decoder": listed})
    ours, _ = words(tmp_path)
    size = theirs.vocab_size()
    assert [ours.token_id(token) for token in ("[MASK]", "[gMASK]", "sop", "<|observation|>")] == [
        size,
        size + 1,
        size + 3,
        size + 8,
    ]
    plain = text.removeprefix("[gMASK]sop<|user|>")
    before = [size + 1, size + 3, size + 6] if plain != text else []
    assert ours.encode(text, False).tolist() == [*before, *theirs.encode(plain)]
    for word in ("isopropyl", "philosophy", "Sopran"):
        assert ours.encode(ours.guard(word), False).tolist() == theirs.encode(word)
    for word in ("sop", "²sop", "[gMASK]sop<|user|>", "图sop."):
        assert not {size + 1, size + 3, size + 6} & set(
            ours.encode(ours.guard(word), False).tolist()
        )
    assert ours.encode("a", True).tolist() == [size + 1, size + 3, *theirs.encode("a")]


@pytest.mark.parametrize(("kind", "offset"), [("unigram", 0), ("unigram", 3), ("bpe", 3)])
def test_chatglm_6b_has_pieces_for_line_breaks_tabs_and_runs_of_blanks(
    tmp_path: Path, kind: str, offset: int
) -> None:
    blanks = [f"<|blank_{size}|>" for size in range(2, 81)]
    theirs = trained(
        tmp_path / "ice_text.model",
        model_type=kind,
        vocab_size=560,
        byte_fallback=True,
        normalization_rule_name="nfkc",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<n>", "[gMASK]", "<sop>", "<|tab|>", *blanks],
    )
    write(tmp_path, {"model_type": "chatglm"}, {"num_image_tokens": offset})
    ours, table = words(tmp_path)
    for text in [*TEXTS, "a" + " " * 85 + "b", "\n\n", "x\t  y"]:
        seen = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for size in range(80, 1, -1):
            seen = seen.replace(" " * size, f"<|blank_{size}|>")
        ids = [index + offset for index in theirs.encode(seen)]
        assert ours.encode(text, False).tolist() == ids, text
        behind = [theirs.piece_to_id(token) + offset for token in ("[gMASK]", "<sop>")]
        assert ours.encode(text, True).tolist() == [*ids, *behind]
    assert table.text(ours.encode("a\n\tb   c", False).tolist()) == "a\n\tb   c"


def tiktoken_file(path: Path, pattern: str, vocab_size: int = 400) -> dict[bytes, int]:
    """A file of ranks trained on the test's sentences."""
    text = "".join([*SENTENCES, *TEXTS] * 3)
    ranks = bpe_train(text, vocab_size, pattern, visualise=None)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    path.write_text("".join(lines))
    return ranks


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GLM4 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def test_qwens_file_gives_tiktokens_ids(tmp_path: Path) -> None:
    ranks = tiktoken_file(tmp_path / "qwen.tiktoken", QWEN)
    theirs = tiktoken.Encoding("qwen", pat_str=QWEN, mergeable_ranks=ranks, special_tokens={})
    write(tmp_path, {"model_type": "qwen", "visual": {}}, {})
    ours, table = words(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(unicodedata.normalize("NFC", text))
        assert ours.encode(text, True).tolist() == ids, text
        assert table.text(ids) == unicodedata.normalize("NFC", text)
    # The places of the released vocabulary, whose 151643 ranks end where these do.
    released = {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<|extra_204|>": 151850}
    released |= {"<ref>": 151851, "</quad>": 151856, "<img>": 151857, "<imgpad>": 151859}
    for token, index in released.items():
        assert ours.token_id(token) == index - 151643 + len(ranks)
    assert ours.encode("a<|im_end|>", False).tolist()[-1] == len(ranks) + 2
    assert table.text([len(ranks) + 2]) == ""


def test_qwen_without_pictures_has_no_tokens_for_them(tmp_path: Path) -> None:
    tiktoken_file(tmp_path / "qwen.tiktoken", QWEN)
    write(tmp_path, {"model_type": "qwen"}, {})
    assert words(tmp_path)[0].token_id("<img>") is None


def test_glm4s_tokenizer_model_is_a_file_of_tiktoken(tmp_path: Path) -> None:
    ranks = tiktoken_file(tmp_path / "tokenizer.model", GLM4)
    special = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>"]
    listed = {str(len(ranks) + i): {"content": t, "special": True} for i, t in enumerate(special)}
    write(tmp_path, {"model_type": "chatglm"}, {"added_tokens_decoder": listed})
    theirs = tiktoken.Encoding("glm", pat_str=GLM4, mergeable_ranks=ranks, special_tokens={})
    ours, _ = words(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, False).tolist() == ids
        assert ours.encode(text, True).tolist() == [len(ranks) + 2, len(ranks) + 4, *ids]
    assert ours.token_id("<|user|>") == len(ranks) + 7


@pytest.fixture(scope="module")
def glm4(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptTokenizer, tiktoken.Encoding]:
    folder = tmp_path_factory.mktemp("glm4")
    ranks = tiktoken_file(folder / "tokenizer.model", GLM4)
    write(folder, {"model_type": "chatglm"}, {})
    theirs = tiktoken.Encoding("glm", pat_str=GLM4, mergeable_ranks=ranks, special_tokens={})
    return words(folder)[0], theirs


@given(text=st.text(alphabet="aabbcdehi  rst\n1'é图🙂", max_size=60))
def test_drawn_texts_of_a_file_of_tiktoken(
    glm4: tuple[PromptTokenizer, tiktoken.Encoding], text: str
) -> None:
    ours, theirs = glm4
    assert ours.encode(text, False).tolist() == theirs.encode(text)


def alone(text: str, ranks: dict[str, int]) -> list[str]:
    """Byte pair encoding of a text, by its definition."""
    parts = list(text)
    while True:
        known = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not known:
            return parts
        _, at = min(known)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(
    drawn=st.lists(st.text(alphabet="abc", min_size=2, max_size=7), unique=True, max_size=25),
    text=st.text(alphabet="abc", max_size=20),
)
def test_merges_encode_as_the_ranks_do(drawn: list[str], text: str) -> None:
    ranks = {word: rank for rank, word in enumerate(["a", "b", "c", *drawn])}
    found = merges(ranks)
    library = Tokenizer(BPE(ranks, found))
    assert library.encode(text).tokens == alone(text, ranks)
    made = [left + right for left, right in found]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.model", b"\x0a\x05abc", "cut short"),
        ("tokenizer.model", b"\xff" * 30, "no SentencePiece model"),
        ("tokenizer.model", b"YQ== 0\nYg== 1\n", "for Qwen and GLM-4 alone"),
        ("qwen.tiktoken", b"YQ== 0\n??? 1\n", "not a token in base64"),
        ("qwen.tiktoken", b"YQ== 0\nYg== 2\n", "not all whole numbers"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=f"{name}.*{said}"):
        PromptTokenizer(tmp_path)


def test_tokenizer_json_goes_before_other_files(tmp_path: Path) -> None:
    trained(tmp_path / "tokenizer.model", **LLAMA)
    write(tmp_path, {}, {})
    first, _ = words(tmp_path)
    first._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    second, _ = words(tmp_path)
    assert (
        second.encode("The red circle", True).tolist()
        == first.encode("The red circle", True).tolist()
    )


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_tokens_have_the_ids_that_files_beside_a_model_give_them(tmp_path: Path, kind: str) -> None:
    pieces = trained(tmp_path / "tokenizer.model", model_type=kind, user_defined_symbols=["[U]"])
    last, given = pieces.get_piece_size(), pieces.piece_to_id("[U]")
    marks = {given: "<|mark|>", last: "<|next|>", last + 5: "<|later|>"}
    listed = {str(index): {"content": text, "special": True} for index, text in marks.items()}
    write(tmp_path, {}, {"added_tokens_decoder": listed})
    tokenizer, table = words(tmp_path)
    assert [tokenizer.token_id(text) for text in marks.values()] == [*marks]
    assert tokenizer.encode("".join(marks.values()), False).tolist() == [*marks]
    assert table.text([*marks]) == ""
    text = "The red circle"
    assert tokenizer.encode(text, False).tolist() == pieces.encode(text)


def test_an_id_far_behind_a_model_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "tokenizer.model", model_type="unigram")
    write(tmp_path, {}, {"added_tokens_decoder": {"9999999": {"content": "<|far|>"}}})
    with pytest.raises(InvalidRequest, match=r"tokenizer\.model has .* the id 9999999"):
        words(tmp_path)
