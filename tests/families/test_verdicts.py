"""What comparisons have found, as files: read again for the same files and the same code alone."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.families import verdicts
from services.families.verdicts import Verdict, Verdicts
from shared.checkpoint.folder import Checkpoint

REFUSED = "UNSUPPORTED_MODEL"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's verdicts, of little code."""
    for name in ("services", "shared"):
        (tmp_path / "code" / name).mkdir(parents=True)
        (tmp_path / "code" / name / "a.py").write_text("changed = False\n")
    monkeypatch.setattr(verdicts, "_ROOT", tmp_path / "code")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tessera" / "comparisons"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Any"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def of(folder: Path, *options: str) -> Verdicts:
    return Verdicts(Checkpoint(folder), *options)


def test_a_verdict_is_found_again_and_another_copy_has_the_same(
    model: Path, tmp_path: Path
) -> None:
    assert of(model, "auto").read() is None
    of(model, "auto").write(Verdict(REFUSED, f"{model}: no"))
    assert of(model, "auto").read() == Verdict(REFUSED, f"{model}: no")
    (model / "model.safetensors").write_bytes(b"other weights, which are not read")
    moved = model.rename(tmp_path / "moved")
    assert of(moved, "auto").read() == Verdict(REFUSED, f"{moved}: no")
    of(moved, "native").write(Verdict())
    assert of(moved, "native").read() == Verdict()


def change_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_text('{"architectures": ["Any"], "tie": true}')


def add_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "added_tokens.json").write_text("{}")


def move_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of one file to the beginning of the next."""
    (folder / "config.json").write_text('{"architectures": ["Any"]')
    (folder / "tokenizer.json").write_text("}{}")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = folder.parent / "site"
    (site / "transformers-99.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(site)


def change_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "code" / "shared" / "a.py").write_text("changed = True\n")


def take_instructions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", "none")


@pytest.mark.parametrize(
    "change", [change_config, add_file, move_text, install, change_code, take_instructions]
)
def test_a_change_of_anything_it_depends_on_asks_again(
    change: Callable[[Path, pytest.MonkeyPatch], None], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of(model).write(Verdict())
    assert of(model).read() is not None
    change(model, monkeypatch)
    assert of(model).read() is None


def test_a_file_that_changes_meanwhile_leaves_no_verdict(model: Path) -> None:
    began = of(model)
    (model / "config.json").write_text('{"architectures": ["Other"]}')
    began.write(Verdict())
    assert of(model).read() is None


@pytest.mark.parametrize(
    "content", ["", "{", '{"reason": "", "mess', "[]", "{}", '{"reason": 1, "message": ""}', "null"]
)
def test_a_torn_file_is_none(content: str, model: Path, cache: Path) -> None:
    of(model).write(Verdict())
    [file] = cache.iterdir()
    file.write_text(content)
    assert of(model).read() is None
    of(model).write(Verdict())
    assert of(model).read() == Verdict()


def test_where_nothing_can_be_written_nothing_is_kept(model: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the place of the folder")
    of(model).write(Verdict())
    assert of(model).read() is None


def test_many_writers_at_once_leave_a_whole_file(model: Path, cache: Path) -> None:
    found = Verdict(REFUSED, "no " * 300)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(of(model).write, found) for _ in range(40)]:
            done.result()
    assert of(model).read() == found
    assert len(list(cache.iterdir())) == 1


def test_old_verdicts_are_forgotten(model: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    for number in range(300):
        old = cache / f"{number}.json"
        old.write_text(json.dumps({"reason": "", "message": ""}))
        os.utime(old, (number, number))
    of(model).write(Verdict())
    assert of(model).read() == Verdict()
    assert len(list(cache.iterdir())) == 256
    assert not (cache / "0.json").exists()
