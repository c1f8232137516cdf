"""Ids of blocks of shared memory and of shapes, in MindIE-LLM's encoding."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.artifacts.mindie_shm import (
    BLOCKS,
    Array,
    decode_name,
    decode_shape,
    encode_name,
    encode_shape,
    read_block,
    release_blocks,
    write_block,
)
from shared.errors import InvalidRequest
from shared.settings import child_environment

NAMES = {
    "psm_1a2b3c4d": -2317685603106553856,
    "psm_00000000": -2305843009213693952,
    "psm_deadbeef": -2426968881911037952,
}
SHAPES = {
    (1, 3, 1176, 1960): -4611692068207607106,
    (1, 84, 140): -3458766713196119136,
    (1025,): -1152921504606855176,
    (6, 1176): -2305843022098605249,
    (1, 13, 3, 448, 448): -5764748490362064386,
}


@pytest.mark.parametrize(("name", "code"), NAMES.items())
def test_known_names(name: str, code: int) -> None:
    assert encode_name(name) == code
    assert decode_name(code) == name


@pytest.mark.parametrize(("shape", "code"), SHAPES.items())
def test_known_shapes(shape: tuple[int, ...], code: int) -> None:
    assert encode_shape(shape) == code
    assert decode_shape(code) == shape


@given(body=st.text(alphabet="0123456789abcdefpsmnwABCDEF", min_size=1, max_size=10))
def test_every_name_comes_back(body: str) -> None:
    code = encode_name("psm_" + body)
    assert -(2**63) <= code < 0
    assert decode_name(code) == "psm_" + body


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_every_shape_comes_back(shape: list[int]) -> None:
    code = encode_shape(shape)
    assert -(2**63) <= code < 0
    assert decode_shape(code) == tuple(shape)


@given(code=st.integers(-(2**63), 2**63 - 1))
def test_an_id_is_a_code_or_an_error(code: int) -> None:
    codecs: tuple[tuple[Any, Any], ...] = (
        (decode_name, encode_name),
        (decode_shape, encode_shape),
    )
    for decode, encode in codecs:
        try:
            found = decode(code)
        except InvalidRequest:
            continue
        assert encode(found) == code


@pytest.mark.parametrize("name", ["", "psm_", "abc", "psm_12345678901", "psm_xyz", "/psm_12"])
def test_other_names_have_no_code(name: str) -> None:
    with pytest.raises(InvalidRequest, match="no name of a block"):
        encode_name(name)


@pytest.mark.parametrize(
    "shape", [(), (1,) * 6, (0,), (-1, 2), (1, 5, 448, 448), (2**28 + 1, 1), (1, 1, 1, 8193, 1)]
)
def test_shapes_without_room_have_no_code(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"dimensions; there may be|has no code"):
        encode_shape(shape)


def test_the_largest_dimensions_have_room() -> None:
    for shape in ((2**56,), (2**28, 2**27), (2**17, 4, 2**17, 2**17)):
        assert decode_shape(encode_shape(shape)) == shape


@pytest.fixture
def names(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "names"
    yield path
    release_blocks(path)


def test_a_tensor_is_read_by_its_two_ids(names: Path) -> None:
    arrays: list[Array] = [
        np.arange(12, dtype=np.float32).reshape(1, 3, 4),
        np.arange(5, dtype=np.int64),
    ]
    written = [write_block(array, names) for array in arrays]
    assert names.read_text().split() == written
    for name, array in zip(written, arrays, strict=True):
        found = read_block(encode_name(name), encode_shape(array.shape), array.dtype)
        assert np.array_equal(found, array)
    release_blocks(names)
    assert not names.exists()
    with pytest.raises(InvalidRequest, match=written[0]):
        read_block(encode_name(written[0]), encode_shape((1, 3, 4)), np.float32)


def test_a_block_outlives_the_process_that_wrote_it(names: Path) -> None:
    root = Path(__file__).parents[2]
    script = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from shared.artifacts.mindie_shm import write_block\n"
        "print(write_block(np.arange(4.0), Path(sys.argv[1])))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(names)],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(PYTHONPATH=f"{root}:{root / 'protos'}"),
    )
    assert run.stderr == ""
    found = read_block(encode_name(run.stdout.strip()), encode_shape((4,)), np.float64)
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_block_that_is_too_small_for_the_shape_is_an_error(names: Path) -> None:
    name = write_block(np.zeros(4, np.uint8), names)
    with pytest.raises(InvalidRequest, match="bytes; "):
        read_block(encode_name(name), encode_shape((1 << 20,)), np.float32)


def test_a_full_list_takes_no_block(names: Path) -> None:
    """Of a list that is longer no block could be released."""
    line = write_block(np.zeros(4, np.uint8), names) + "\n"
    names.write_text(line * (65_536 // len(line)))
    before = set(BLOCKS.glob("psm_*"))
    with pytest.raises(InvalidRequest, match="more than 65536 bytes"):
        write_block(np.zeros(4, np.uint8), names)
    assert set(BLOCKS.glob("psm_*")) <= before
    release_blocks(names)
    assert not (BLOCKS / line.strip()).exists()


def test_no_block_is_made_for_nothing(names: Path) -> None:
    with pytest.raises(InvalidRequest, match="0 bytes for a block"):
        write_block(np.zeros(0), names)
    assert not names.exists()


def test_blocks_that_are_gone_and_lines_that_are_no_names(names: Path, tmp_path: Path) -> None:
    kept = write_block(np.ones(1), names)
    with names.open("a") as file:
        file.write("psm_00000000\n")
    other = tmp_path / "other"
    other.write_text(f"{kept}\n../../etc/passwd\n")
    with pytest.raises(InvalidRequest, match="no name of a block"):
        release_blocks(other)
    assert read_block(encode_name(kept), encode_shape((1,)), np.float64).tolist() == [1.0]
    release_blocks(names)
    release_blocks(names)
