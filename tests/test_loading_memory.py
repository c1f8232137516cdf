"""Loading a service takes no more memory than its own part and one small shard, whatever the checkpoint's files are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.checkpoint.folder import Checkpoint
from tests.support.checkpoints import make_checkpoint

_SHARD = 40 << 20
_SLACK = 48 << 20  # for what the first run of a library allocates
_TEXT = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


@pytest.fixture(scope="module", params=[_SHARD, 1 << 40], ids=["shards", "one file"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large text model and a tiny tower, in eight shards or in one file of 200 MB."""
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), "idefics3", text=_TEXT, shard_bytes=request.param
    )


@pytest.mark.full  # 200 MB of weights are made and read
@pytest.mark.parametrize(
    ("part", "quantization", "smaller"),
    [
        ("native", "none", 1),
        ("native", "int8", 3.9),  # scales are a thousandth of it
        ("native", "int4", 7),
        ("transformers", "none", 1),
        ("encoder", "none", 1),
    ],
)
def test_the_most_is_the_part_and_a_small_shard_however_large_files_are(
    folder: Path, part: str, quantization: str, smaller: float
) -> None:
    checkpoint = Checkpoint(folder)
    sizes = {name: checkpoint.nbytes(name) for name in checkpoint.names()}
    whole = sum(sizes.values())
    tower = sum(size for name, size in sizes.items() if "vision" in name or "connector" in name)
    own = tower if part == "encoder" else whole - tower
    assert max(tower, _SHARD) < whole / 4 and len(list(folder.glob("*.safetensors"))) in (1, 8)
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.loading_memory", part, folder, quantization],
        cwd=Path(__file__).parents[1],
        env={"PYTHONPATH": ".:protos", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    most, _ = json.loads(run.stdout.splitlines()[-1])
    cache = 0 if part == "encoder" else 16 << 20
    own = int(own / smaller)  # the embedding of this model is small
    assert most <= own + cache + _SHARD + _SLACK
