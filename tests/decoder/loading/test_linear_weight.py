"""Linear weights on their way from a checkpoint to a device: read late, stacked, cut."""

from pathlib import Path

import pytest
import torch

from services.decoder.devices.base.ops import BaseOps
from services.decoder.loading.linear_weight import StackedWeight, in_memory
from services.decoder.loading.weights import LanguageWeights
from services.decoder.models.llama import Llama
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint


def test_a_weight_is_read_when_it_is_packed(tmp_path: Path) -> None:
    read: list[str] = []

    class Recording(Checkpoint):
        def tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().tensor(name)

    checkpoint = Recording(make_checkpoint(tmp_path, "qwen2"))
    weights = LanguageWeights(checkpoint, Llama.TENSORS, Llama.IGNORED)
    found = weights.take_linear("layers.0.self_attn.k_proj", 32, 64, bias=True)
    stored = "model.layers.0.self_attn.k_proj"
    assert read == [f"{stored}.bias"] and found.quantized() is None
    packed = BaseOps(torch.device("cpu"), torch.bfloat16).pack(found)
    assert read == [f"{stored}.bias", f"{stored}.weight"]
    assert torch.equal(packed.weight, checkpoint.tensor(f"{stored}.weight").bfloat16())
    with pytest.raises(InvalidRequest, match=r"says \[64, 64\] but stored is \[32, 64\]"):
        weights.take_linear("layers.0.self_attn.k_proj", 64, 64)


def test_stacked_weights_are_one_and_shards_are_cut_out_of_them() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(out, 6) for out in (4, 2, 2)]
    shifts = [torch.randn(len(part)) for part in parts]
    both = zip(parts, shifts, strict=True)
    stacked = StackedWeight([in_memory(part, shift) for part, shift in both])
    whole, bias = torch.cat(parts), torch.cat(shifts)
    assert (stacked.out, stacked.inputs) == (8, 6)
    assert stacked.bias is not None and torch.equal(stacked.bias, bias)
    assert torch.equal(stacked.dense(torch.float32), whole)
    assert torch.equal(stacked.dense(torch.bfloat16), whole.bfloat16())

    # Two of four query heads beside a key and a value head that another shard has too.
    shard = stacked.shard("out", [(2, 4), (4, 5), (6, 7)])
    rows = [2, 3, 4, 6]
    assert (shard.out, shard.inputs) == (4, 6)
    assert shard.bias is not None and torch.equal(shard.bias, bias[rows])
    assert torch.equal(shard.dense(torch.float32), whole[rows])

    columns = stacked.shard("in", [(0, 2), (4, 5)])
    assert (columns.out, columns.inputs) == (8, 3)
    assert columns.bias is not None and torch.equal(columns.bias, bias)
    assert torch.equal(columns.dense(torch.float32), whole[:, [0, 1, 4]])
