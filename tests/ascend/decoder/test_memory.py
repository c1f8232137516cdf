"""The size of an NPU's cache follows from its memory, and what it comes to is said where it is not enough."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.environment import npu_environment
from tests.ascend.support import run_python
from tests.support.checkpoints import make_checkpoint

MIB = 1 << 20
SHARE, RESERVED = 0.8, 16 * MIB
_LOAD = """
import json, sys
import torch, torch_npu
from services.decoder.loading.graphs import graph_bytes
from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from shared.errors import ServingError
folder, held, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
held = torch.empty(held, dtype=torch.uint8, device="npu")
try:
    loaded = load(DecoderSettings.model_validate({"model": folder, "device": "npu", **options}))
except ServingError as error:
    print(json.dumps({"reason": error.reason, "message": error.message}))
    sys.exit()
kv = sum(x.untyped_storage().nbytes() for layer in loaded.worker._kv for x in (layer.k, layer.v))
free, total = torch_npu.npu.mem_get_info()
outside = total - free - torch_npu.npu.memory_reserved()
torch_npu.npu.empty_cache()
print(json.dumps({
    "total": total,
    "outside": outside,
    "allocated": torch_npu.npu.memory_allocated(),
    "kv": kv,
    "step": loaded.profile.step_bytes,
    "graphs": graph_bytes(options["graphs"], loaded.worker._model, loaded.device, 1024, 1024),
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose sequences are long, so that the cache is bounded by memory alone."""
    text = {"max_position_embeddings": 4096}
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", text=text)


def load(
    folder: Path, hbm_bytes: int, npu: str = "910B4", held: int = 0, **options: Any
) -> dict[str, Any]:
    """What a decoder says that has been loaded on an NPU of so much memory, of which something is `held` by others."""
    wanted = {
        "gpu_memory_utilization": SHARE,
        "npu_reserved_memory": RESERVED,
        "num_host_blocks": 0,
        "max_num_batched_tokens": 256,
        "max_model_len": 1024,
        "max_num_seqs": 1024,
        "graphs": "off",
    }
    arguments = [str(folder), str(held), json.dumps({**wanted, **options})]
    code = f"import sys; sys.argv[1:] = {arguments!r}\n{_LOAD}"
    said = run_python(code, npu_environment(npu, hbm_bytes=hbm_bytes))
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("npu", "hbm_bytes", "graphs"),
    [
        ("910B4", 256 * MIB, "off"),
        pytest.param("910B4", 384 * MIB, "on", marks=pytest.mark.full),
        pytest.param("910B3", 512 * MIB, "off", marks=pytest.mark.full),
    ],
)
def test_the_cache_takes_what_the_rest_leaves(
    folder: Path, npu: str, hbm_bytes: int, graphs: str
) -> None:
    found = load(folder, hbm_bytes, npu, graphs=graphs)
    assert found["total"] == hbm_bytes
    assert (found["graphs"] > 0) == (graphs == "on")
    assert found["outside"] > hbm_bytes // 256  # what CANN takes here, and workspaces
    held = 0 if graphs == "off" else found["graphs"]
    weights = found["allocated"] - found["kv"] - held
    taken = weights + found["step"] + found["outside"] + found["graphs"]
    expected = SHARE * hbm_bytes - taken - RESERVED
    assert found["kv"] == pytest.approx(expected, rel=0.02)


def test_every_term_is_named_where_nothing_is_left(folder: Path) -> None:
    found = load(folder, 128 * MIB, npu_reserved_memory=100 * MIB)
    assert found["reason"] == "KV_CACHE_TOO_SMALL"
    for word in (
        "--gpu-memory-utilization",
        "weights",
        "--max-num-batched-tokens",
        "CANN",
        "--npu-reserved-memory",
        "--max-model-len",
    ):
        assert word in found["message"]


def test_memory_that_others_hold_is_seen_before_anything_is_loaded(folder: Path) -> None:
    found = load(folder, 128 * MIB, held=64 * MIB)
    assert found["reason"] == "DEVICE_MEMORY_TAKEN"
    assert "npu-smi" in found["message"]
    assert re.search(r"at most --gpu-memory-utilization 0\.[345]\d*$", found["message"])


def test_another_block_size_is_refused(folder: Path) -> None:
    assert load(folder, 128 * MIB, block_size=16)["reason"] == "UNSUPPORTED_BLOCK_SIZE"
