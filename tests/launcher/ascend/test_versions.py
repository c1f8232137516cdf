"""Which torch, torch_npu and CANN belong together."""

import re
from pathlib import Path

import pytest

from services.launcher.ascend import versions


@pytest.mark.parametrize(
    ("torch_npu", "cann"),
    [
        ("2.9.0", "8.5.0"),
        ("2.9.0.post1", "8.5.0"),  # not in the table: the one before it
        ("2.9.0.post2", "9.0.0"),
        ("2.10.0.post4", "9.1.0"),
        ("2.10.0.post7", "9.2.0"),
        ("2.14.0", "9.2.0"),
        ("2.15.0", "9.2.0"),  # newer than the table
        ("2.9.1", "8.5.0"),  # a torch that is not in it: that of 2.9.0
        ("2.7.1.post8", ""),  # older than it
    ],
)
def test_each_torch_npu_has_its_cann(torch_npu: str, cann: str) -> None:
    assert versions.cann_for(torch_npu) == cann


def test_a_cann_has_those_that_were_made_for_it() -> None:
    assert versions.torch_npu_for("9.0.0") == ["2.10.0", "2.9.0.post2", "2.8.0.post4"]
    assert versions.torch_npu_for("9.0.1") == versions.torch_npu_for("9.0.0")
    assert versions.torch_npu_for("7.0.0") == []


def test_the_table_of_the_document_is_this_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "ascend.md").read_text()
    rows = re.findall(r"^\| (\d\S*) \| (.*?) \|", text, re.MULTILINE)
    listed = {
        torch_npu: cann for cann, row in rows for torch_npu in re.findall(r"2\.\d[\w.]*\w", row)
    }
    assert listed == versions.CANN_OF


def test_candidates_come_before_releases_and_corrections_after_them() -> None:
    in_order = ["8.2.RC1", "8.3.RC1", "8.3.RC2", "8.3.0", "8.5.0", "9.0.0", "9.0.0.post1", "9.1.0"]
    numbers = [versions.number(version) for version in in_order]
    assert sorted(numbers) == numbers


def test_torch_npu_wants_its_own_torch() -> None:
    assert versions.belong_together("2.9.0+cpu", "2.9.0.post2")
    assert not versions.belong_together("2.13.0+cpu", "2.9.0.post2")
    assert not versions.belong_together("2.9.1", "2.9.0")


@pytest.mark.parametrize("version", ["8.3.RC2", "9.0.0"])
def test_cann_tells_its_version_by_a_file_or_its_folder(version: str, tmp_path: Path) -> None:
    home = tmp_path / f"cann-{version}"
    home.mkdir()
    link = tmp_path / "latest"
    link.symlink_to(home)
    assert versions.installed_cann(link) == version
    assert versions.installed_cann(tmp_path / "nowhere") == ""
