"""Percent-encoding and base64 are decoded in slices as the standard library decodes them whole."""

import base64
import binascii
import random
import tracemalloc
from urllib.parse import unquote_to_bytes

import pytest

from shared.prompts.data_url import base64_bytes, percent_bytes

# More than a slice, so that what is cut is at every place of one.
LONG = 300_000


@pytest.mark.parametrize("letters", ["%", "%4", "%4a", "%Ff0g", "%89ab \n", "xyz", "%%41é"])
@pytest.mark.parametrize("seed", range(3))
def test_percent_encoding_is_read_as_the_standard_library_reads_it(letters: str, seed: int) -> None:
    draw = random.Random(seed)
    for size in (1, 2, 3, 10, 1000, LONG + seed):
        data = "".join(draw.choices(letters, k=size)).encode()
        assert percent_bytes(data) == unquote_to_bytes(data)
        assert percent_bytes(memoryview(data)) == unquote_to_bytes(data)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 98_303, 98_304, 98_305, LONG])
def test_base64_is_read_with_all_that_urls_may_have_in_it(size: int) -> None:
    content = random.Random(size).randbytes(size)
    data = base64.b64encode(content)
    assert base64_bytes(data) == base64_bytes(memoryview(data)) == content
    lines = base64.encodebytes(content)
    assert base64_bytes(lines) == content
    quoted = data.replace(b"/", b"%2F").replace(b"+", b"%2b").replace(b"=", b" %3D")
    assert base64_bytes(quoted) == content


@pytest.mark.parametrize("place", [0, 5, 131_071, 131_072, 262_143, 262_144])
@pytest.mark.parametrize("wrong", [b"=", b"==", b"!", b"A"])
def test_what_is_no_base64_is_refused_wherever_it_is_wrong(place: int, wrong: bytes) -> None:
    data = base64.b64encode(bytes(LONG))
    spoilt = data[:place] + wrong + data[place:]
    with pytest.raises(ValueError):
        base64.b64decode(spoilt, validate=True)
    with pytest.raises((binascii.Error, ValueError)):
        base64_bytes(spoilt)


@pytest.mark.parametrize("decode", [percent_bytes, base64_bytes])
def test_decoding_needs_little_memory_beside_the_result(decode: object) -> None:
    content = random.Random(0).randbytes(4 << 20)
    data = base64.b64encode(content)
    if decode is percent_bytes:
        data = b"%41" * (4 << 20)
    tracemalloc.start()
    try:
        assert len(decode(data)) == 4 << 20  # type: ignore[operator]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(data) + (4 << 20)
