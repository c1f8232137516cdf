"""`tessera weights strip-infix`: a copy of a checkpoint under other names, bit for bit."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services.launcher import cli
from shared.checkpoint.conversion import written_file as module
from shared.checkpoint.folder import Checkpoint
from tests.support.checkpoints import as_torch_files, make_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sharded checkpoint whose layers' matrices have the infix, with a NaN, and files in a folder."""
    folder = make_checkpoint(tmp_path / "source", "llama", shard_bytes=20_000)
    rename(folder, lambda name: name.replace("proj.weight", "proj.original_linear.weight"))
    (folder / "notes").mkdir()
    (folder / "notes" / "training_args.bin").write_bytes(b"\x80args")
    (folder / "notes" / "link.txt").symlink_to("training_args.bin")
    return folder


def rename(folder: Path, renamed: Callable[[str], str]) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = {renamed(name): tensor for name, tensor in load_file(file).items()}
        next(iter(tensors.values())).view(-1)[0] = float("nan")
        save_file(tensors, file, {"format": "pt", "made by": "a test"})
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["note"] = "kept"
    index["weight_map"] = {renamed(name): file for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def strip(source: Path, destination: Path, *more: str) -> int:
    return cli.run(["weights", "strip-infix", str(source), str(destination), *more])


def bits(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.tensor(name).view(torch.uint8)


@pytest.mark.parametrize("pickled", [False, True])
def test_names_lose_the_infix_and_nothing_else_changes(
    source: Path, tmp_path: Path, pickled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if pickled:
        as_torch_files(source)
    target = tmp_path / "target"
    assert strip(source, target) == 0
    before, after = Checkpoint(source), Checkpoint(target)
    assert any("original_linear." in name for name in before.names())
    for name in before.names():
        new = name.replace("original_linear.", "")
        assert torch.equal(bits(before, name), bits(after, new))
    assert len(before.names()) == len(after.names())
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["note"] == "kept"
    assert index["metadata"]["total_size"] == sum(after.nbytes(name) for name in after.names())
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        f"[{n}/{len(shards)}]" for n in range(1, len(shards) + 1)
    ]
    for name in ("config.json", "tokenizer.json", "notes/training_args.bin"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert (target / "notes" / "link.txt").read_bytes() == b"\x80args"
    with safe_open(target / shards[0], framework="pt") as file:
        expected = {"format": "pt"} if pickled else {"format": "pt", "made by": "a test"}
        assert file.metadata() == expected


def test_one_file_and_an_infix_of_ones_own(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    records = {"c.base.weight": "a.base.weight", "format": "pt"}
    save_file({"a.base.weight": torch.ones(2)}, source / "model.safetensors", records)
    assert strip(source, tmp_path / "target", "--infix", "base.") == 0
    with safe_open(tmp_path / "target" / "model.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["a.weight"]
        assert file.metadata() == {"c.weight": "a.weight", "format": "pt"}


def test_of_tensors_in_one_storage_one_is_kept_and_the_other_recorded(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    whole = torch.arange(8.0)
    tensors = {
        "x.original_linear.weight": whole,
        "head.weight": whole,
        "half.weight": whole[4:],
        "none.weight": whole[:0],
    }
    torch.save(tensors, source / "pytorch_model.bin")
    assert strip(source, tmp_path / "target") == 0
    found = load_file(tmp_path / "target" / "model.safetensors")
    assert sorted(found) == ["half.weight", "none.weight", "x.weight"]
    assert torch.equal(found["x.weight"], whole) and torch.equal(found["half.weight"], whole[4:])
    with safe_open(tmp_path / "target" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "x.weight"}


def collide(source: Path, target: Path) -> None:
    rename(source, lambda name: name.replace("q_proj.original_linear", "k_proj"))


def lead_out(source: Path, target: Path) -> None:
    (source / "notes" / "out").symlink_to("/etc/hostname")


def lead_out_by_a_folder(source: Path, target: Path) -> None:
    (source / "out").symlink_to("/etc")


def add_a_large_file(source: Path, target: Path) -> None:
    with (source / "consolidated.safetensors").open("wb") as file:
        os.truncate(file.fileno(), (1 << 30) + 1)


def fill_the_target(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("")


def lose_a_shard(source: Path, target: Path) -> None:
    next(source.glob("*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (collide, "get the same name"),
        (lead_out, "leads out of the folder"),
        (lead_out_by_a_folder, "leads out of the folder"),
        (add_a_large_file, "more than 1 GiB"),
        (fill_the_target, "no empty folder"),
        (lose_a_shard, "lacks 1 of"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(
    source: Path,
    tmp_path: Path,
    change: Callable[[Path, Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "target"
    change(source, target)
    assert strip(source, target) == 1
    assert said in capsys.readouterr().err
    assert not list(target.glob("*.safetensors")) and not target.with_name("target.part").exists()


def test_a_folder_is_not_rewritten_in_place(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in (source, source / "inside"):
        assert strip(source, target) == 1
        assert "or lies in it" in capsys.readouterr().err


def test_an_infix_that_no_name_has_is_an_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert strip(source, tmp_path / "target", "--infix", "base_layer.") == 1
    assert "no tensor has 'base_layer.'" in capsys.readouterr().err


def test_a_difference_is_reported_by_the_tensors_name(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def save_wrongly(
        tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]
    ) -> None:
        wrong = {name: tensor.clone() for name, tensor in tensors.items()}
        wrong[sorted(wrong)[-1]].view(-1)[-1] += 1
        save_file(wrong, path, metadata)

    monkeypatch.setattr(module, "save_file", save_wrongly)
    assert strip(source, tmp_path / "target") == 1
    assert "is not what was written to it: " in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
