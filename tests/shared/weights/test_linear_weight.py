"""Linear weights on their way from a checkpoint to a device: read late, stacked, cut."""

from pathlib import Path

import pytest
import torch

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.weights.linear_weight import StackedWeight, in_memory
from shared.weights.named_weights import NamedWeights
from tests.support.checkpoints import as_torch_files, make_checkpoint


def named(checkpoint: Checkpoint) -> NamedWeights:
    """Its tensors by their names behind `model.`."""
    return NamedWeights(
        checkpoint, {name.removeprefix("model."): name for name in checkpoint.names()}
    )


def test_a_weight_is_read_when_it_is_packed(tmp_path: Path) -> None:
    read: list[str] = []

    class Recording(Checkpoint):
        def tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().tensor(name)

    checkpoint = Recording(make_checkpoint(tmp_path, "qwen2"))
    weights = named(checkpoint)
    found = weights.take_linear("layers.0.self_attn.k_proj", 32, 64, bias=True)
    stored = "model.layers.0.self_attn.k_proj"
    assert read == [f"{stored}.bias"] and found.quantized() is None
    dense = found.dense(torch.bfloat16)
    assert read == [f"{stored}.bias", f"{stored}.weight"]
    assert torch.equal(dense, checkpoint.tensor(f"{stored}.weight").bfloat16())
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

    # What is reordered first is cut in its new order.
    order = [7, 0, 2, 1, 3, 6, 5, 4]
    turned = stacked.reordered(order).shard("out", [(1, 4), (7, 8)])
    assert turned.bias is not None and torch.equal(turned.bias, bias[[0, 2, 1, 4]])
    assert torch.equal(turned.dense(torch.float32), whole[[0, 2, 1, 4]])
    corner = turned.shard("in", [(5, 6), (1, 3)])
    assert torch.equal(corner.dense(torch.float32), whole[[0, 2, 1, 4]][:, [5, 1, 2]])


def test_a_weight_is_filled_up_with_zeros() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(4, 6), torch.randn(4)
    stored = in_memory(weight, bias)
    assert stored.spread("out", range(4), 4) is stored
    rows = stored.spread("out", [0, 1, 4, 5], 7)
    assert (rows.out, rows.inputs) == (7, 6) and rows.bias is not None
    assert torch.equal(rows.bias[[0, 1, 4, 5]], bias) and not rows.bias[[2, 3, 6]].any()
    found = rows.dense(torch.float32)
    assert torch.equal(found[[0, 1, 4, 5]], weight) and not found[[2, 3, 6]].any()
    columns = stored.spread("in", [7, 0, 1, 2, 4, 5], 8)
    assert (columns.out, columns.inputs) == (4, 8) and columns.bias is bias
    found = columns.dense(torch.float32)
    assert torch.equal(found[:, [7, 0, 1, 2, 4, 5]], weight) and not found[:, [3, 6]].any()
    assert torch.equal(columns.shard("in", [(6, 8)]).dense(torch.float32), found[:, 6:])
    assert torch.equal(rows.shard("in", [(1, 3)]).dense(torch.float32)[4], weight[2, 1:3])


def test_each_output_is_scaled() -> None:
    torch.manual_seed(0)
    weight, bias, factors = torch.randn(4, 6), torch.randn(4), torch.randn(4).bfloat16()
    scaled = in_memory(weight, bias).scaled(factors)
    expected = weight.bfloat16() * factors[:, None]
    assert torch.equal(scaled.dense(torch.bfloat16), expected)
    assert scaled.bias is not None and torch.equal(scaled.bias, bias.bfloat16() * factors)
    assert scaled.quantized() is None
    corner = scaled.shard("out", [(3, 4), (0, 2)]).shard("in", [(2, 5)])
    assert torch.equal(corner.dense(torch.bfloat16), expected[[3, 0, 1], 2:5])


@pytest.mark.parametrize("pickled", [False, True])
def test_a_shard_reads_its_part_of_the_checkpoint_alone(tmp_path: Path, pickled: bool) -> None:
    parts: list[torch.Tensor] = []

    class Counting(Checkpoint):
        def tensor(self, name: str) -> torch.Tensor:
            raise AssertionError(f"{name} is read whole")

        def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
            parts.append(super().part(name, rows, columns))
            return parts[-1]

    folder = make_checkpoint(tmp_path, "llama")
    folder = as_torch_files(folder) if pickled else folder
    whole = Checkpoint(folder)
    weights = named(Counting(folder))
    mlp = "layers.1.mlp"
    sizes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    gate, up, down = (weights.take_linear(f"{mlp}.{name}", *size) for name, size in sizes.items())
    stored = [whole.tensor(f"model.{mlp}.{name}.weight") for name in sizes]

    both = StackedWeight([gate, up]).reordered([*range(96, 192), *range(96)])
    half = both.shard("out", [(0, 48), (96, 144)]).dense(torch.float32)
    assert torch.equal(half, torch.cat([stored[1][:48], stored[0][:48]]))
    inputs = down.shard("in", [(48, 96)]).dense(torch.float32)
    assert torch.equal(inputs, stored[2][:, 48:])
    assert sum(part.nbytes for part in parts) == sum(weight.nbytes for weight in stored) // 2
