"""A model whose output is no number is refused with the tensor that is damaged, or the type that is too small."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.float8 import Float8, write_float8


def refusal(folder: Path, **changes: object) -> str:
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    with pytest.raises(InvalidRequest) as raised:
        load(DecoderSettings.model_validate({**values, **changes}))
    return raised.value.message


def edit(folder: Path, name: str, value: float, times: float = 1) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] *= times
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_damaged_tensor_is_named(tmp_path: Path, name: str, value: float) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    edit(folder, name, value)
    assert f"the tensor {name} cannot be used: it has an element that is no number" in refusal(
        folder
    )


def test_finite_weights_are_said_to_be_beyond_the_type(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    edit(folder, "model.norm.weight", 3e38, times=3e38)
    said = refusal(folder)
    assert "LlamaForCausalLM gives no finite numbers in float32, though each of its" in said
    assert "give --dtype float32" in refusal(folder, dtype="bfloat16")


@pytest.mark.parametrize("how", [Float8(), Float8("compressed-tensors", None)], ids=str)
def test_a_scale_of_numbers_of_8_bits_that_is_none_is_named(tmp_path: Path, how: Float8) -> None:
    write_float8(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama"), how)
    last = "weight_scale_inv" if how.method == "fp8" else "weight_scale"
    name = f"model.layers.0.self_attn.k_proj.{last}"
    path = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    assert f"{name} cannot be used: it has an element that is no number" in refusal(
        tmp_path / "coded"
    )
