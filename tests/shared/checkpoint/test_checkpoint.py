"""Tensors of a folder by name, in both formats that weights come in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.settings import child_environment
from tests.support.checkpoints import as_torch_files, make_checkpoint

TENSORS = {
    "wide": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.arange(4, dtype=torch.bfloat16).reshape(4, 1),
    "ids": torch.arange(5),
    "none": torch.zeros(0, 3, dtype=torch.float16),
}


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 20_000}])
def test_both_formats_have_the_same_tensors(tmp_path: Path, options: dict[str, int]) -> None:
    folder = make_checkpoint(tmp_path, "llama", **options)
    checkpoint = Checkpoint(folder)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    checkpoint.close()
    pickled = Checkpoint(as_torch_files(folder))
    assert not list(folder.glob("*.safetensors"))
    assert pickled.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(pickled.tensor(name), tensor)


def test_sizes_of_pickled_tensors_are_those_of_safetensors(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    save_file(TENSORS, one / "model.safetensors")
    torch.save(TENSORS, other / "pytorch_model.bin")
    safe, pickled = Checkpoint(one), Checkpoint(other)
    assert safe.names() == pickled.names()
    for name in TENSORS:
        assert pickled.shape(name) == safe.shape(name)
        assert pickled.dtype(name) == safe.dtype(name)
        assert pickled.nbytes(name) == safe.nbytes(name)
    assert pickled.default_dtype("cpu") == safe.default_dtype("cpu")


def test_safetensors_go_before_pickled_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert Checkpoint(tmp_path).names() == ["a"]


def test_a_transposed_tensor_is_read_row_by_row(tmp_path: Path) -> None:
    torch.save({"a": TENSORS["wide"].T}, tmp_path / "pytorch_model.bin")
    tensor = Checkpoint(tmp_path).tensor("a")
    assert tensor.is_contiguous() and torch.equal(tensor, TENSORS["wide"].T)


def test_parameters_come_without_gradients(tmp_path: Path) -> None:
    torch.save({"a": torch.nn.Parameter(torch.ones(2))}, tmp_path / "pytorch_model.bin")
    assert not Checkpoint(tmp_path).tensor("a").requires_grad


class Foreign:
    """What a pickle could run code with."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this must not run",)


@pytest.mark.parametrize("content", [{"a": torch.ones(1), "b": Foreign()}, {"a": {}}, [1]])
def test_a_pickle_of_more_than_tensors_is_refused(
    tmp_path: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match=r"pytorch_model\.bin cannot be read"):
        Checkpoint(tmp_path).names()
    assert capsys.readouterr().out == ""


def test_a_pickle_without_an_archive_is_refused(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    with pytest.raises(InvalidRequest, match=r"the one before version 1\.6, which is not read"):
        Checkpoint(tmp_path).names()


def test_a_folder_of_pickled_tensors_is_checked_without_torch(tmp_path: Path) -> None:
    folder = as_torch_files(make_checkpoint(tmp_path, "llava", shard_bytes=20_000))
    index = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    script = (
        "import sys; from pathlib import Path\n"
        "from services.families.check import require_servable\n"
        "require_servable(Path(sys.argv[1]))\n"
        "assert not {'torch', 'safetensors'} & set(sys.modules)\n"
    )
    path = child_environment(PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", script, str(folder)], env=path, check=True, timeout=100)


def test_an_index_of_pickled_tensors_that_says_too_much_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint(as_torch_files(make_checkpoint(tmp_path, "llama")))
    names = dict.fromkeys((*checkpoint.names(), "more.weight"), "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(InvalidRequest, match=r"pytorch_model\.bin lacks more\.weight, which"):
        Checkpoint(tmp_path).shape("more.weight")
