"""Checkpoints as msmodelslim writes them for Ascend NPUs: read on every device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from services.decoder.loading.load import load
from services.decoder.models.llama import Llama
from services.decoder.settings import DecoderSettings
from services.families.check import Parts, require_servable
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.ascend_codes import DESCRIPTION, NARROW, WEIGHTS, write_ascend
from tests.support.decoder.prompts_step import PROMPTS, run_prompts
from tests.support.decoder.step_stream import greedy, read_floats

KINDS = ("W8A8", "W8A8_DYNAMIC", "W8A16")
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [False, True])
def test_codes_are_read_as_they_were_written(tmp_path: Path, kind: str, half: bool) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    layers = write_ascend(tmp_path / "coded", dense, kind, half=half)
    numbers = load_file(dense / "model.safetensors")
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    for name in layers:
        expected = numbers[f"{name}.weight"]
        weight = weights.take_linear(name.removeprefix("model."), *expected.shape)
        found = weight.quantized()
        assert found is not None and (found.bits, found.group, found.zeros) == (8, 0, None)
        assert found.activations == (16 if kind == "W8A16" else 8)
        torch.testing.assert_close(weight.dense(torch.float32), expected)
        assert weight.bias is None
        some = weight.shard("out", [(3, 13)]).shard("in", [(8, 16)]).quantized()
        assert some is not None and some.activations == found.activations


@pytest.mark.parametrize(("family", "kind"), [("llama", "W8A8_DYNAMIC"), ("qwen2", "W8A8")])
def test_a_decoder_of_codes_says_what_their_numbers_say(
    tmp_path: Path, family: str, kind: str
) -> None:
    """Also where the codes have the layers' biases."""
    dense = make_checkpoint(tmp_path / "dense", family)
    layers = write_ascend(tmp_path / "coded", dense, kind)
    values = {"model": tmp_path / "coded", "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    with capture_logs() as logs:
        loaded = load(DecoderSettings.model_validate({**values, "threads": 1}))
    [line] = [line for line in logs if line["event"] == "quantized weights"]
    assert (line["scheme"], line["layers"]) == ("of the checkpoint", len(layers) * 4 // 7)
    found = read_floats(run_prompts(loaded.worker, greedy(logprobs=0)).logprobs)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    expected = torch.stack(logits).log_softmax(-1).amax(-1)
    assert torch.allclose(torch.tensor(found).double(), expected, atol=2e-2)


def described(folder: Path, **changes: Any) -> None:
    path = folder / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{LAYER}.weight": "W4A4_DYNAMIC"}, "q_proj.weight is 'W4A4_DYNAMIC', and FLOAT, W8A8"),
        ({"kv_cache_type": "C8"}, "kv_cache_type: quantized caches"),
        ({"fa_quant_type": "FAQuant"}, "fa_quant_type: quantized caches"),
        ({"group_size": "64"}, "group_size is '64'"),
        ({"model.norm.module.bias": "W8A8"}, "module.bias: norms that were moved"),
        ({"model.norm.bias": "FLOAT"}, "norm.bias: norms that were moved"),
        ({f"{LAYER}.weight": "FLOAT"}, "q_proj.weight cannot be used: .* it is not quantized"),
    ],
)
def test_what_is_not_read_is_refused_before_anything_is_loaded(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_ascend(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama"), "W8A8")
    told: dict[str, Any] = {"parts": Parts.WEIGHTS, "device": "cpu"}
    require_servable(tmp_path / "coded", **told)
    described(tmp_path / "coded", **changes)
    with pytest.raises(InvalidRequest, match=said):
        require_servable(tmp_path / "coded", **told)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("deq_scale", torch.full((64,), float("nan")), "deq_scale cannot be used: .* no number"),
        ("input_scale", torch.zeros(1), "input_scale cannot be used: it is 0"),
        ("input_scale", torch.tensor([float("inf")]), "input_scale cannot be used: it is inf"),
        ("input_offset", torch.tensor([float("nan")]), "input_offset cannot be used: it is nan"),
        ("input_scale", None, "input_scale cannot be used: the checkpoint lacks it"),
        ("quant_bias", torch.zeros(3, dtype=torch.int32), "quant_bias cannot be used: it is I32"),
    ],
)
def test_tensors_that_make_no_weight_are_refused_by_name(
    tmp_path: Path, part: str, value: torch.Tensor | None, said: str
) -> None:
    write_ascend(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama"), "W8A8")
    path = tmp_path / "coded" / WEIGHTS
    tensors = load_file(path)
    out = len(tensors[f"{LAYER}.deq_scale"])
    del tensors[f"{LAYER}.{part}"]
    if value is not None:
        tensors[f"{LAYER}.{part}"] = value[:out] if len(value) > 3 else value
    save_file(tensors, path, {"format": "pt"})
    values = {"model": tmp_path / "coded", "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    with pytest.raises(InvalidRequest, match=said):
        load(DecoderSettings.model_validate({**values, "threads": 1}))


@pytest.mark.parametrize("layer", ["self_attn.v_proj", "mlp.up_proj"])
def test_a_layer_without_a_bias_is_computed_with_those_whose_codes_have_one(
    tmp_path: Path, layer: str
) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    write_ascend(tmp_path / "coded", dense, "W8A8")
    path = tmp_path / "coded" / WEIGHTS
    tensors, name = load_file(path), f"model.layers.0.{layer}"
    # Zero where the activations' zero is: what it takes away is nothing.
    tensors[f"{name}.input_offset"] = torch.zeros(1)
    tensors[f"{name}.quant_bias"] = torch.zeros_like(tensors[f"{name}.quant_bias"])
    save_file(tensors, path, {"format": "pt"})
    values = {"model": tmp_path / "coded", "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    loaded = load(DecoderSettings.model_validate({**values, "threads": 1}))
    found = read_floats(run_prompts(loaded.worker, greedy(logprobs=0)).logprobs)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    expected = torch.stack(logits).log_softmax(-1).amax(-1)
    assert torch.allclose(torch.tensor(found).double(), expected, atol=2e-2)


# Groups and versions of codes of 4 bits.
NARROW_WAYS = [(0, "1.0.0"), (32, "1.0.0"), (32, "0"), (0, "0")]


@pytest.mark.parametrize(("group", "version"), NARROW_WAYS)
def test_codes_of_4_bits_are_read_as_they_were_written(
    tmp_path: Path, group: int, version: str
) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    layers = write_ascend(tmp_path / "coded", dense, NARROW, group=group, version=version)
    require_servable(tmp_path / "coded", device="cpu")
    numbers = load_file(dense / "model.safetensors")
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    for name in layers:
        expected = numbers[f"{name}.weight"]
        weight = weights.take_linear(name.removeprefix("model."), *expected.shape)
        found = weight.quantized()
        assert found is not None and found.zeros is None
        assert (found.bits, found.group, found.activations) == (4, group, 16)
        torch.testing.assert_close(weight.dense(torch.float32), expected)
        some = weight.shard("out", [(3, 14)]).shard("in", [(32, 64)])
        torch.testing.assert_close(some.dense(torch.float32), expected[3:14, 32:64])


@pytest.mark.parametrize(
    ("group", "version", "others"), [(32, "1.0.0", "W8A8_DYNAMIC"), (0, "0", "W8A8")]
)
def test_a_decoder_of_codes_of_4_bits_says_what_their_numbers_say(
    tmp_path: Path, group: int, version: str, others: str
) -> None:
    """Also where layers of attention have 8 bits."""
    dense = make_checkpoint(tmp_path / "dense", "qwen2")
    folder = tmp_path / "coded"
    write_ascend(folder, dense, NARROW, group=group, version=version, others=others)
    require_servable(folder, device="cpu")
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    loaded = load(DecoderSettings.model_validate(values))
    found = read_floats(run_prompts(loaded.worker, greedy(logprobs=0)).logprobs)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    expected = torch.stack(logits).log_softmax(-1).amax(-1)
    assert torch.allclose(torch.tensor(found).double(), expected, atol=2e-2)


def test_groups_that_the_description_does_not_tell_have_256_inputs(tmp_path: Path) -> None:
    """Where it has scales for groups at all."""
    text = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 1}
    dense = make_checkpoint(tmp_path / "dense", "llama", text=text)
    folder = tmp_path / "coded"
    [name, *_] = write_ascend(folder, dense, NARROW, group=256, version="0")
    path = folder / DESCRIPTION
    said = json.loads(path.read_text())
    del said["group_size"]
    path.write_text(json.dumps(said))
    expected = load_file(dense / "model.safetensors")[f"{name}.weight"]
    weights = Llama._weights(Checkpoint(folder))
    weight = weights.take_linear(name.removeprefix("model."), *expected.shape)
    torch.testing.assert_close(weight.dense(torch.float32), expected)


@pytest.mark.parametrize(
    ("part", "value", "changes", "said"),
    [
        ("weight", torch.zeros(64, 64).char(), {}, r"q_proj\.weight_scale .*: it is F32 \[64, 1\]"),
        ("weight", torch.zeros(33, 64).char(), {}, r"q_proj\.weight_scale .* be .* \[66, 1\]"),
        ("weight_scale", None, {}, r"q_proj\.weight_scale cannot be used: .* lacks it"),
        ("weight_scale_second", None, {}, r"q_proj\.weight_scale_second .* lacks it"),
        (
            "weight_scale_second",
            torch.ones(64, 4),
            {},
            r"weight_scale_second .*\[64, 4\] .*\[64, 2\]",
        ),
        (None, None, {"group_size": 0}, r"weight_scale_second .*: it is F32 \[64, 3\] .*\[64, 1\]"),
        (None, None, {"group_size": 40}, r"weight_scale_second .* do not divide into groups of 40"),
        (None, None, {"version": "0"}, r"weight_scale .* \[32, 1\]"),
    ],
)
def test_shapes_that_codes_of_4_bits_cannot_have_are_refused_by_name(
    tmp_path: Path, part: str | None, value: torch.Tensor | None, changes: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "coded"
    write_ascend(folder, make_checkpoint(tmp_path / "dense", "llama"), NARROW, group=32)
    replaced(folder, part, value)
    described(folder, **changes)
    with pytest.raises(InvalidRequest, match=said):
        require_servable(folder, device="cpu")


@pytest.mark.parametrize(
    ("part", "value", "version", "said"),
    [
        ("weight", torch.full((64, 64), 8).char(), "0", "weight cannot be used: .* none of 4 bits"),
        ("weight_offset", torch.ones(64, 1), "1.0.0", "weight_offset cannot be used: it is not 0"),
        ("weight_offset_second", torch.ones(64, 2), "1.0.0", "offset_second .*: it is not 0"),
        ("weight_scale", torch.full((64, 1), float("nan")), "0", "weight_scale .* no number"),
        ("weight_scale_second", torch.full((64, 2), float("inf")), "0", "second .* no number"),
    ],
)
def test_numbers_that_codes_of_4_bits_cannot_have_are_refused_by_name(
    tmp_path: Path, part: str, value: torch.Tensor, version: str, said: str
) -> None:
    folder = tmp_path / "coded"
    dense = make_checkpoint(tmp_path / "dense", "llama")
    write_ascend(folder, dense, NARROW, group=32, version=version)
    replaced(folder, part, value)
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    with pytest.raises(InvalidRequest, match=said):
        load(DecoderSettings.model_validate(values))


def replaced(folder: Path, part: str | None, value: torch.Tensor | None) -> None:
    """A tensor of LAYER; None: removed."""
    if part is None:
        return
    tensors = load_file(folder / WEIGHTS)
    del tensors[f"{LAYER}.{part}"]
    if value is not None:
        tensors[f"{LAYER}.{part}"] = value
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
