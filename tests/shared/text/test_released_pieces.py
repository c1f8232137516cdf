"""InternLM2's released layout: control tokens that lie at pieces of the SentencePiece model."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.errors import InvalidRequest
from shared.text.text_fold import TokenBytes
from tests.reference_models import internlm2_words
from tests.reference_models.internlm2_words import END, MARKS, OLD_START, START

CHAT = f"{START}user\nThe red  circle.{END}\n{START}assistant\n"


@pytest.fixture
def size(tmp_path: Path) -> int:
    """Pieces of the tokenizer in the test's folder."""
    return internlm2_words.write_words(tmp_path)


def test_the_piece_at_a_listed_id_is_renamed(tmp_path: Path, size: int) -> None:
    internlm2_words.add_marks(tmp_path)
    theirs, ours = internlm2_words.InternLM2Words(tmp_path), PromptTokenizer(tmp_path)
    assert {text: ours.token_id(text) for text in MARKS} == {
        text: size + place for text, place in MARKS.items()
    }
    assert ours.vocab_size == size
    for text in (CHAT, "[UNUSED_TOKEN_7] and a\n\n b", f"{START}{END}"):
        assert ours.encode(text, True).tolist() == theirs.encode(text, special=True)
    # The piece has no other name any more, and users cannot write it.
    assert ours.token_id(OLD_START) is None
    assert size - 1 not in ours.encode(OLD_START, False)
    assert not {size - 1, size - 2} & set(ours.encode(ours.guard(CHAT), False).tolist())
    table = TokenBytes.from_tokenizer_json(tmp_path / "tokenizer.json")
    ids = [*theirs.encode("The red circle."), size - 2]
    assert table.text(ids) == "The red circle."
    assert table.text(ids, skip_special_tokens=False) == f"The red circle.{END}"


def test_tokens_behind_the_pieces_have_their_listed_ids(tmp_path: Path, size: int) -> None:
    """As InternVL2's on InternLM2; the listed ids leave a gap here."""
    more = {"<img>": size, "</img>": size + 1, "<IMG_CONTEXT>": size + 4}
    internlm2_words.add_marks(tmp_path, more)
    ours = PromptTokenizer(tmp_path)
    assert {text: ours.token_id(text) for text in more} == more
    assert ours.token_id(START) == size - 1


def test_without_marks_the_pieces_keep_their_names(tmp_path: Path, size: int) -> None:
    """XComposer2's: its prompt is written with the pieces themselves."""
    theirs, ours = internlm2_words.InternLM2Words(tmp_path), PromptTokenizer(tmp_path)
    text = CHAT.replace(START, OLD_START)
    assert ours.encode(text, True).tolist() == theirs.encode(text, special=True)
    assert ours.token_id(OLD_START) == size - 1


@pytest.mark.parametrize("kind", ["InternLMXComposer2Tokenizer", "InternLM2TokenizerFast"])
def test_the_class_begins_a_text(tmp_path: Path, kind: str) -> None:
    internlm2_words.write_words(tmp_path, tokenizer_class=kind)
    assert PromptTokenizer(tmp_path).encode("red", True)[0] == 1


@pytest.mark.parametrize("listed", [{"x": {"content": "a"}}, {"3": {}}])
def test_a_list_that_makes_no_sense_is_an_error_of_the_file(
    tmp_path: Path, size: int, listed: dict[str, Any]
) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(InvalidRequest, match=r"tokenizer_config\.json: an added token"):
        PromptTokenizer(tmp_path)
