"""Pages of mapped files leave the resident set and come back with the same content; other memory is left alone."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.mapped_pages import give_back
from shared.checkpoint.weight_reader import WeightReader

_SIZE = 4096  # of matrices in float32: 64 MB


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text("{}")
    values = {name: torch.full((_SIZE, _SIZE), float(number)) for number, name in enumerate("abc")}
    save_file(values, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


def resident_files() -> int:
    """Bytes of mapped files that are resident."""
    found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_what_is_given_back_is_not_resident_and_still_there(checkpoint: Checkpoint) -> None:
    tensor = checkpoint.tensor("b")
    before = resident_files()
    assert float(tensor.sum()) == _SIZE**2
    read = resident_files()
    assert read - before > 60 << 20
    give_back(tensor[1 : _SIZE // 2, 5:90])  # what lies between its rows, too
    assert 28 << 20 < read - resident_files() < 34 << 20
    give_back(tensor)
    assert resident_files() - before < 2 << 20
    assert float(tensor.sum()) == _SIZE**2


def test_memory_that_is_no_files_is_left_alone() -> None:
    tensor = torch.arange(1 << 20)
    give_back(tensor)
    give_back(torch.empty(0))
    assert torch.equal(tensor, torch.arange(1 << 20))


def test_a_reader_keeps_little_resident_however_much_it_reads(checkpoint: Checkpoint) -> None:
    reader, before = WeightReader(checkpoint, "abc"), resident_files()
    kept, step = [], _SIZE // 16
    for name in "abc":
        for first in range(0, _SIZE, step):
            rows, columns = slice(first, first + step), slice(0, _SIZE)
            kept.append(reader.part(name, rows, columns))
            assert resident_files() - before < 40 << 20
    reader.finish()
    assert resident_files() - before < 4 << 20
    assert [float(part[0, 0]) for part in kept[::16]] == [0, 1, 2]
