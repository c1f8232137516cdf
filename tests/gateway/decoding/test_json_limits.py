"""What is counted in a JSON text before it is read is what is in it, wherever it is cut into slices."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.openai.schema import ChatRequest
from services.gateway.decoding.decode import decode
from services.gateway.decoding.json_limits import check_json
from shared.errors import InvalidRequest

TEXTS = st.text(alphabet='[]{},:"\\aé', max_size=12)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0) if isinstance(value, dict | list) else 0


def allows(text: bytes, depth: int, slice_bytes: int) -> bool:
    try:
        check_json(text, depth, slice_bytes)
    except InvalidRequest:
        return False
    return True


@given(value=VALUES, slice_bytes=st.integers(1, 40), readable=st.booleans())
def test_depth_is_found_in_slices_of_any_size(value: Any, slice_bytes: int, readable: bool) -> None:
    text = json.dumps(value, ensure_ascii=not readable).encode()
    depth = depth_of(value)
    assert allows(text, depth, slice_bytes)
    if depth:
        assert not allows(text, depth - 1, slice_bytes)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_encodings_hide_nothing(encoding: str) -> None:
    with pytest.raises(InvalidRequest):
        decode(json.dumps({"a": [[1]]}).encode(encoding), ChatRequest)


@pytest.mark.parametrize(
    "field", ["tools", "response_format", "guided_json", "documents", "metadata", "unknown"]
)
def test_no_field_holds_bytes_that_are_no_text(field: str) -> None:
    body = b'{"model": "m", "messages": [], "%s": [{"x": "\xff"}]}' % field.encode()
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        decode(body, ChatRequest)
