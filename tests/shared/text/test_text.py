"""The folds of shared/text/text_fold.py against the `tokenizers` library and against plain string search."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from shared.text.stop_search import StopStrings
from shared.text.text_fold import StopFinder, StopMatch, TextFold, TokenBytes, UnsupportedTokenizer
from tests.support.tokenizers import (
    SENTENCES,
    SPECIAL,
    byte_level_tokenizer,
    regex_replace_tokenizer,
    save,
    sentencepiece_like_tokenizer,
    token_id,
)


def table_of(tokenizer: Tokenizer) -> TokenBytes:
    with tempfile.TemporaryDirectory() as folder:
        return TokenBytes.from_tokenizer_json(save(tokenizer, Path(folder)))


@cache
def byte_level() -> tuple[Tokenizer, TokenBytes]:
    tokenizer = byte_level_tokenizer()
    return tokenizer, table_of(tokenizer)


@cache
def sentencepiece_like() -> tuple[Tokenizer, TokenBytes]:
    tokenizer = sentencepiece_like_tokenizer()
    return tokenizer, table_of(tokenizer)


KINDS = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like}
texts = st.text(
    st.one_of(st.sampled_from("abENDSTOP \n圆红😀👩‍é."), st.characters(codec="utf-8")), max_size=40
)


def deltas(fold: TextFold, ids: list[int]) -> list[str]:
    return [fold.push(token) for token in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_text_equals_the_library_for_texts(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer, table = KINDS[kind]()
    ids = tokenizer.encode(data.draw(texts)).ids
    for special in data.draw(st.lists(st.sampled_from(sorted(table.special_ids)), max_size=3)):
        ids.insert(data.draw(st.integers(0, len(ids))), special)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    if kind == "sentencepiece_like" and "\ufffd" in expected:
        return  # a special token inside a character: see the docstring of the byte-fallback rule
    assert table.text(ids, skip_special_tokens=skip) == expected


@given(ids=st.lists(st.integers(0, 490), max_size=40), skip=st.booleans())
def test_text_equals_the_library_for_random_byte_level_ids(ids: list[int], skip: bool) -> None:
    tokenizer, table = byte_level()
    assert table.text(ids, skip_special_tokens=skip) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@given(data=st.data())
def test_text_equals_the_library_for_random_sentencepiece_ids(data: st.DataObject) -> None:
    tokenizer, table = sentencepiece_like()
    plain = st.integers(259, tokenizer.get_vocab_size() - 1).map(lambda i: [i])
    broken = st.sampled_from([[0xE4], [0xF0, 0x9F], [0xFF], [0x80]]).map(
        lambda run: [3 + byte for byte in run] + [token_id(tokenizer, "▁")]
    )
    whole = st.sampled_from("é圆😀 A").map(
        lambda c: [3 + b for b in c.encode()] + [token_id(tokenizer, "▁")]
    )
    special = st.sampled_from([[1], [2]])
    runs = data.draw(st.lists(st.one_of(plain, broken, whole, special), max_size=20))
    ids = [token for run in runs for token in run]
    assert table.text(ids) == tokenizer.decode(ids)
    assert table.text(ids, skip_special_tokens=False) == tokenizer.decode(
        ids, skip_special_tokens=False
    )


def test_tables_mark_special_tokens_and_ignore_unknown_ids() -> None:
    tokenizer, table = byte_level()
    assert table.special_ids == {tokenizer.token_to_id(token) for token in SPECIAL}
    assert table.pieces[token_id(tokenizer, "<tool call>")] == b"<tool call>"
    assert table.text([10**6, -1]) == ""


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_fold_and_cut_equal_truncation_at_the_first_stop(kind: str, data: st.DataObject) -> None:
    """After each token the whole text is searched; the first hit ends the output."""
    tokenizer, table = KINDS[kind]()
    text = data.draw(texts)
    ids = tokenizer.encode(text).ids
    stops = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(["END", "STOP", "\n", "圆", "😀", "E", "S"]),
                st.integers(0, max(0, len(text) - 1)).flatmap(
                    lambda a: st.integers(a + 1, a + 6).map(lambda b: text[a:b] or "x")
                ),
            ),
            min_size=1,
            max_size=4,
        )
    )
    fold, finder = TextFold(table, stops=StopStrings(stops)), StopFinder(table, StopStrings(stops))
    out, match, used = "", None, 0
    for used, token in enumerate(ids, 1):  # noqa: B007
        out += fold.push(token)
        match = finder.push(token)
        if match:
            break
    so_far = table.text(ids[:used])
    found = sorted((so_far.find(s), i) for i, s in enumerate(stops) if s in so_far)
    if not found:
        assert match is None
        assert out + fold.finish() == so_far
        return
    at, index = found[0]
    assert match is not None and match.stop == stops[index]
    assert out + fold.finish(match.cut_bytes) == so_far[:at]
    assert not any(s in table.text(ids[: used - 1]) for s in stops)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, k=st.integers(0, 60))
def test_resuming_anywhere_gives_the_same_rest(kind: str, text: str, k: int) -> None:
    tokenizer, table = KINDS[kind]()
    ids = tokenizer.encode(text + " END").ids
    stops = [" END of", "圆形"]
    once = TextFold(table, stops=StopStrings(stops))
    all_deltas = [*deltas(once, ids), once.finish()]
    again = TextFold(table, stops=StopStrings(stops))
    deltas(again, ids[:k])
    assert [*deltas(again, ids[k:]), again.finish()] == all_deltas[min(k, len(ids)) :]


def test_text_that_may_begin_a_stop_string_is_held_back_and_released() -> None:
    table = TokenBytes([b"E", b"N", b"D", b"x", b" "])
    fold = TextFold(table, stops=StopStrings(["END"]))
    assert deltas(fold, [3, 0, 1, 3, 0, 0, 1]) == ["x", "", "", "ENx", "", "E", ""]
    assert fold.push(2) == ""
    assert fold.finish(3) == ""


def test_a_stop_string_may_begin_and_end_inside_tokens() -> None:
    table = TokenBytes([b"one EN", b"D two"])
    finder, fold = (
        StopFinder(table, StopStrings(["END"])),
        TextFold(table, stops=StopStrings(["END"])),
    )
    assert fold.push(0) == "one "
    assert finder.push(0) is None
    assert fold.push(1) == ""
    assert finder.push(1) == StopMatch("END", len("END two"))
    assert fold.finish(len("END two")) == ""


def test_a_kept_stop_string_cuts_nothing() -> None:
    table = TokenBytes([b"EN", b"D"])
    finder = StopFinder(table, StopStrings(["END"]), include_stop=True)
    fold = TextFold(table, stops=StopStrings(["END"]), include_stop=True)
    assert [finder.push(0), finder.push(1)] == [None, StopMatch("END", 0)]
    assert deltas(fold, [0, 1]) == ["EN", "D"]
    assert fold.finish(0) == ""


def test_special_tokens_do_not_interrupt_a_stop_string_unless_shown() -> None:
    table = TokenBytes([b"EN", b"D", b"<s>"], special_ids=[2])
    hidden = StopFinder(table, StopStrings(["END"]))
    assert [hidden.push(t) for t in (0, 2, 1)] == [None, None, StopMatch("END", 3)]
    shown = StopFinder(table, StopStrings(["END"]), skip_special_tokens=False)
    assert [shown.push(t) for t in (0, 2, 1)] == [None, None, None]


def test_the_stripped_leading_space_takes_no_part_in_a_stop_string() -> None:
    tokenizer, table = sentencepiece_like()
    ids = tokenizer.encode("the").ids
    assert table.text(ids) == "the"
    finder = StopFinder(table, StopStrings([" the"]))
    assert [finder.push(token) for token in ids] == [None] * len(ids)


def test_a_cut_into_delivered_text_is_refused() -> None:
    fold = TextFold(TokenBytes([b"abc"]), stops=StopStrings(["x"]))
    fold.push(0)
    with pytest.raises(ValueError, match="held back"):
        fold.finish(2)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["END", ""])


@pytest.mark.parametrize("name", ["WordPiece", "regular expression", "none"])
def test_unknown_decoders_are_named(tmp_path: Path, name: str) -> None:
    tokenizer = regex_replace_tokenizer()
    if name == "WordPiece":
        tokenizer.decoder = decoders.WordPiece()
    if name == "none":
        tokenizer.decoder = None
    with pytest.raises(UnsupportedTokenizer, match=name):
        TokenBytes.from_tokenizer_json(save(tokenizer, tmp_path))


def test_whole_sentences_stream_in_complete_characters() -> None:
    tokenizer, table = byte_level()
    for sentence in SENTENCES:
        fold = TextFold(table)
        pieces = deltas(fold, tokenizer.encode(sentence).ids)
        assert "".join(pieces) + fold.finish() == sentence
        assert not any("\ufffd" in piece for piece in pieces)
