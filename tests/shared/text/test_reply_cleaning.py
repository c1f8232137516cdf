"""A reply that is cleaned piece by piece is the reply that the model's own code cleans as a whole."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text.reply_cleaning import STRIP, TRAINING_DATE, WIDE_PUNCTUATION, ReplyCleaner

STEPS = (STRIP, TRAINING_DATE, WIDE_PUNCTUATION)


def processed(response: str) -> str:
    """`process_response` of ChatGLM-6B, by its description: read in the released modeling_chatglm.py."""
    response = response.strip().replace("[[训练时间]]", "2023年")
    for narrow, wide in zip(",!:;?", "，！：；？", strict=True):
        response = re.sub(f"([\u4e00-\u9fff]){re.escape(narrow)}", rf"\1{wide}", response)
        response = re.sub(f"{re.escape(narrow)}([\u4e00-\u9fff])", rf"{wide}\1", response)
    return response


PIECES = st.one_of(
    st.text(alphabet="中文a ,!:;?\n[训练]", max_size=4), st.just("[[训练时间]]"), st.just("[[训练")
)


@given(pieces=st.lists(PIECES, max_size=12))
def test_pieces_give_what_the_whole_gives(pieces: list[str]) -> None:
    cleaner = ReplyCleaner(STEPS)
    shown = "".join(map(cleaner.push, pieces)) + cleaner.finish()
    assert shown == processed("".join(pieces))


def test_what_nothing_can_change_is_shown_at_once() -> None:
    cleaner = ReplyCleaner(STEPS)
    shown = [
        cleaner.push(piece) for piece in (" \n", "你好", "!", "Yes", ", ", "a", "[[", "b", "\n")
    ]
    assert shown == ["", "你好", "！", "Yes", "", ", a", "", "[[b", ""]
    assert cleaner.finish() == ""


def test_an_unknown_step_is_an_error() -> None:
    with pytest.raises(KeyError):
        ReplyCleaner(["polish"])
