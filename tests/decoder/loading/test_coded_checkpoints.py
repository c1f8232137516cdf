"""Checkpoints whose layers are codes: AWQ, GPTQ and compressed-tensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.decoder.loading.load import load
from services.decoder.models.llama import Llama
from services.decoder.settings import DecoderSettings
from services.families.check import Parts, require_servable
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.weights.linear_weight import StackedWeight
from tests.decoder.loading.test_quantization import loaded_with, log_probabilities
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.broken_layer import LAYER, removed, replaced
from tests.support.checkpoints.coded import Coded, Layer, edit_quantization, write_coded
from tests.support.decoder.prompts_step import PROMPTS, run_prompts
from tests.support.decoder.step_stream import greedy, read_floats

WAYS = [
    Coded("awq"),
    Coded("awq", group=0),
    Coded("gptq"),
    Coded("gptq", version="gptq_v2", ordered=True),
    Coded("gptq", symmetric=True, ordered=True),
    Coded("gptq", bits=8, group=0, symmetric=True),
    Coded("gptq", bits=8),
    Coded("pack-quantized", symmetric=True),
    Coded("pack-quantized", ordered=True),
    Coded("pack-quantized", bits=8, group=0),
    Coded("int-quantized", bits=8, group=0, symmetric=True),
    Coded("int-quantized", bits=8),
    Coded("int-quantized", bits=8, group=0, symmetric=True, one_scale=True),
    Coded("int-quantized", symmetric=True),  # W4A8
    Coded("int-quantized", group=0),
]
ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_codes_are_read_as_they_were_packed(tmp_path: Path, how: Coded) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    layers = write_coded(tmp_path / "coded", dense, how)
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    for name, layer in layers.items():
        out, inputs = layer.codes.shape
        weight = weights.take_linear(name.removeprefix("model."), out, inputs)
        found = weight.quantized()
        assert found is not None and (found.bits, found.group) == (how.bits, how.group)
        assert (found.order is not None, found.zeros is None) == (how.ordered, how.symmetric)
        order = torch.arange(inputs) if found.order is None else found.order
        assert torch.equal(found.unpacked().long(), layer.codes[:, order])
        assert torch.equal(found.dequantize(torch.float64), layer.dense())
        # Of a shard that begins and ends inside words.
        shard = weight.shard("out", [(3, 13), (22, 31)])
        rows = [*range(3, 13), *range(22, 31)]
        assert torch.equal(shard.dense(torch.float64), layer.dense()[rows])


@pytest.mark.parametrize("how", [WAYS[0], WAYS[2], WAYS[4], WAYS[7], WAYS[10]], ids=str)
def test_a_decoder_of_codes_says_what_their_numbers_say(tmp_path: Path, how: Coded) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    write_coded(tmp_path / "coded", dense, how)
    values = {"model": tmp_path / "coded", "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    with capture_logs() as logs:
        loaded = load(DecoderSettings.model_validate({**values, "threads": 1}))
    [line] = [line for line in logs if line["event"] == "quantized weights"]
    # Four of each layer, and not the head.
    assert (line["scheme"], line["layers"]) == ("of the checkpoint", 8)
    found = read_floats(run_prompts(loaded.worker, greedy(logprobs=0)).logprobs)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    expected = torch.stack(logits).log_softmax(-1).amax(-1)
    # Devices that multiply by codes round activations to 14 bits.
    assert torch.allclose(torch.tensor(found).double(), expected, atol=2e-2)


@pytest.mark.parametrize(
    ("how", "changes", "said"),
    [
        (WAYS[0], {"bits": 3}, "says awq: bits is 3 and may be 4"),
        (WAYS[0], {"version": "gemv"}, "version is 'gemv'"),
        (WAYS[2], {"bits": 2}, "says gptq: bits is 2 and may be 4 or 8"),
        (WAYS[2], {"group_size": None}, "group_size is None"),
        (WAYS[2], {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (
            WAYS[2],
            {"dynamic": {"+:q": {"bits": 3}}},
            "dynamic has 3 bits for .*, and there may be 4",
        ),
        (WAYS[2], {"dynamic": {"+:q": 8}}, "dynamic has no JSON object for"),
        (WAYS[7], {"format": "marlin-24"}, "format is 'marlin-24'"),
        (WAYS[7], {"format": "float-quantized"}, "weights.type is 'int' and may be float"),
        (WAYS[7], {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        (WAYS[7], {"config_groups": {}}, "config_groups is empty"),
        (WAYS[7], {"quant_method": "quanto"}, "says quanto: of quantized checkpoints those of awq"),
    ],
)
def test_fields_that_are_not_read_are_refused_before_anything_is_loaded(
    tmp_path: Path, how: Coded, changes: dict[str, Any], said: str
) -> None:
    write_coded(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama"), how)
    told: dict[str, Any] = {"parts": Parts.WEIGHTS, "device": "cpu"}
    require_servable(tmp_path / "coded", **told)
    edit_quantization(tmp_path / "coded", **changes)
    with pytest.raises(InvalidRequest, match=f"quantization_config.*{said}"):
        require_servable(tmp_path / "coded", **told)


@pytest.mark.parametrize("how", [WAYS[0], WAYS[2], WAYS[7], WAYS[11]], ids=str)
def test_codes_of_which_nothing_is_said_are_refused_before_anything_is_loaded(
    tmp_path: Path, how: Coded
) -> None:
    folder = tmp_path / "coded"
    write_coded(folder, make_checkpoint(tmp_path / "dense", "llama"), how)
    config = json.loads((folder / "config.json").read_text())
    told = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    check: dict[str, Any] = {"parts": Parts.WEIGHTS, "device": "cpu"}
    with pytest.raises(InvalidRequest, match=r"_proj\.\w+ is of a quantized .*: use the config"):
        require_servable(folder, **check)
    (folder / "quantize_config.json").write_text(json.dumps(told))
    with pytest.raises(InvalidRequest, match=r"quantize_config\.json says it as older tools did"):
        require_servable(folder, **check)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    require_servable(folder, **check)


def test_codes_of_quanto_are_refused_by_its_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight._data"] = tensors.pop(f"{LAYER}.weight").to(torch.int8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check: dict[str, Any] = {"parts": Parts.WEIGHTS, "device": "cpu"}
    with pytest.raises(InvalidRequest, match=r"k_proj\.weight\._data is of a quantized layer"):
        require_servable(folder, **check)
    (folder / "quanto_qmap.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"by quanto_qmap\.json it is optimum-quanto"):
        require_servable(folder, **check)


BITS_OF_8 = ("k_proj", "down_proj")  # one of layers that are computed as one, and one that is alone


def write_mixed(folder: Path, dense: Path, kind: str) -> dict[str, Layer]:
    """Layers of 4 bits in groups of 32, but some of 8 in groups of 16; in `dense` they are numbers."""
    ways = (Coded(kind, symmetric=kind == "gptq"), Coded(kind, bits=8, group=16))
    layers: dict[str, Layer] = {}
    coded: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for place, how in enumerate(ways):
        own = dense.with_name(f"dense{place}")
        shutil.copytree(dense, own)
        found = write_coded(folder.with_name(f"coded{place}"), own, how)
        for files, into in ((folder.with_name(f"coded{place}"), coded), (own, numbers)):
            for name, tensor in load_file(files / "model.safetensors").items():
                if place == any(part in name for part in BITS_OF_8):
                    into[name] = tensor
        layers |= {n: layer for n, layer in found.items() if place == n.endswith(BITS_OF_8)}
    shutil.copytree(folder.with_name("coded0"), folder)
    save_file(coded, folder / "model.safetensors", {"format": "pt"})
    save_file(numbers, dense / "model.safetensors", {"format": "pt"})
    if kind == "gptq":
        edit_quantization(folder, dynamic={r"+:.*\.(k|down)_proj": {"bits": 8, "group_size": 16}})
    else:
        groups = {
            f"group_{i}": how.config()["config_groups"]["group_0"] for i, how in enumerate(ways)
        }
        edit_quantization(folder, config_groups=groups)
    return layers


@pytest.mark.parametrize("kind", ["gptq", "pack-quantized"])
def test_layers_may_have_bits_and_groups_of_their_own(tmp_path: Path, kind: str) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    layers = write_mixed(tmp_path / "coded", dense, kind)
    weights = Llama._weights(require_servable(tmp_path / "coded", device="cpu"))
    for name, layer in layers.items():
        weight = weights.take_linear(name.removeprefix("model."), *layer.codes.shape)
        codes = weight.quantized()
        form = (8, 16) if name.endswith(BITS_OF_8) else (4, 32)
        assert codes is not None and (codes.bits, codes.group) == form
        assert torch.equal(codes.dequantize(torch.float64), layer.dense())
    expected = log_probabilities(loaded_with(dense, "none", dtype="float32"))
    found = log_probabilities(loaded_with(tmp_path / "coded", "auto", dtype="float32"))
    assert torch.allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize(
    ("kind", "part", "value", "said"),
    [
        ("gptq", "qzeros", torch.zeros((2, 3), dtype=torch.int32), "3 words for 32 outputs have"),
        ("gptq", "qzeros", None, r"k_proj\.qzeros cannot be used: the checkpoint lacks it"),
        ("gptq", "scales", torch.ones(3, 32), r"64 inputs do not divide into 3 groups"),
        ("pack-quantized", "weight_shape", None, r"weight_shape cannot be used: the checkpoint"),
        ("pack-quantized", "weight_shape", torch.tensor([32, 9]), "words for 9 inputs have not 4"),
        ("pack-quantized", "weight_scale", torch.ones(32, 5), "do not divide into 5 groups"),
        ("pack-quantized", "weight_scale", torch.ones(32), r"weight_scale .* it is no matrix"),
    ],
)
def test_layers_whose_tensors_tell_no_bits_are_refused_by_them(
    tmp_path: Path, kind: str, part: str, value: Tensor | None, said: str
) -> None:
    folder = tmp_path / "coded"
    write_mixed(folder, make_checkpoint(tmp_path / "dense", "llama"), kind)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(f"{LAYER}.{part}")
    if value is not None:
        tensors[f"{LAYER}.{part}"] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequest, match=said):
        require_servable(folder, parts=Parts.WEIGHTS, device="cpu")


def of_auto_round(packing: str, **changes: Any) -> dict[str, Any]:
    told = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}"}
    return told | {"bits": 4, "group_size": 32, "sym": False, "data_type": "int"} | changes


@pytest.mark.parametrize(
    ("how", "packing"), [(WAYS[0], "auto_awq"), (WAYS[2], "auto_gptq")], ids=["awq", "gptq"]
)
def test_auto_round_has_the_layers_of_others(tmp_path: Path, how: Coded, packing: str) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    layers = write_coded(tmp_path / "coded", dense, how)
    path = tmp_path / "coded" / "config.json"
    config = json.loads(path.read_text())

    def told(**changes: Any) -> Checkpoint:
        config["quantization_config"] = of_auto_round(packing, **changes)
        path.write_text(json.dumps(config))
        return require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")

    alike = {LAYER: {"bits": 4, "group_size": 32}}
    weights = Llama._weights(told(extra_config=alike))
    for name, layer in layers.items():
        weight = weights.take_linear(name.removeprefix("model."), *layer.codes.shape)
        assert weight.is_coded and torch.equal(weight.dense(torch.float64), layer.dense())
    for changes, said in (
        ({"extra_config": {LAYER: {"bits": 3}}}, f"extra_config has 3 bits for {LAYER}"),
        ({"extra_config": {LAYER: {"bits": 16}}}, r"k_proj\.qweight .* says that it is not quant"),
        ({"packing_format": "auto_round:exllamav2"}, "packing_format is 'auto_round:exll"),
        ({"bits": 2}, "bits is 2"),
        ({"act_bits": 8}, "act_bits is 8"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            told(**changes)


@pytest.mark.parametrize(
    ("how", "change", "config", "said"),
    [
        (WAYS[0], removed("scales"), {}, r"k_proj\.scales cannot be used: the checkpoint lacks it"),
        (WAYS[2], removed("qweight"), {}, r"k_proj\.qweight cannot be used: the checkpoint lacks"),
        (WAYS[3], removed("g_idx"), {}, r"k_proj\.g_idx cannot be used: the checkpoint lacks it"),
        (WAYS[2], replaced("scales", torch.ones(3, 32)), {}, r"scales .* F32 \[3, 32\] and has to"),
        (WAYS[7], removed("weight_scale"), {}, r"weight_scale cannot be used: the checkpoint"),
        (
            WAYS[0],
            lambda tensors: None,
            {"modules_to_not_convert": ["k_proj"]},
            r"k_proj\.qweight cannot be used: config\.json says that it is not quantized",
        ),
        (WAYS[2], lambda tensors: None, {"group_size": 40}, "do not divide into groups of 40"),
    ],
)
def test_tensors_that_make_no_weight_are_refused_by_their_names(
    tmp_path: Path,
    how: Coded,
    change: Callable[[dict[str, Tensor]], None],
    config: dict[str, Any],
    said: str,
) -> None:
    folder = tmp_path / "coded"
    write_coded(folder, make_checkpoint(tmp_path / "dense", "llama"), how)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_quantization(folder, **config)
    with pytest.raises(InvalidRequest, match=said):
        Llama.check_names(Checkpoint(folder))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("how", [WAYS[0], WAYS[2], WAYS[7], WAYS[11]], ids=str)
def test_scales_that_are_no_numbers_are_refused_by_their_name(
    tmp_path: Path, how: Coded, value: float
) -> None:
    folder = tmp_path / "coded"
    write_coded(folder, make_checkpoint(tmp_path / "dense", "llama"), how)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in (f"{LAYER}.scales", f"{LAYER}.weight_scale") if n in tensors)
    tensors[name][1, 1] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    with pytest.raises(InvalidRequest, match=rf"{name} cannot be used: .* no number, or infinite"):
        load(DecoderSettings.model_validate(values))


def test_layers_that_are_left_out_are_numbers(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    layers = write_coded(tmp_path / "coded", dense, WAYS[0])
    path = tmp_path / "coded" / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not n.startswith(f"{LAYER}.")}
    tensors[f"{LAYER}.weight"] = layers[LAYER].dense().float()
    save_file(tensors, path, {"format": "pt"})
    edit_quantization(tmp_path / "coded", modules_to_not_convert=[LAYER])
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    weight = weights.take_linear(LAYER.removeprefix("model."), *layers[LAYER].codes.shape)
    assert weight.quantized() is None
    assert torch.equal(weight.dense(torch.float64), layers[LAYER].dense())


def test_layers_that_are_one_with_inputs_in_different_orders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "coded"
    dense = make_checkpoint(tmp_path / "dense", "llama")
    written = write_coded(folder, dense, WAYS[3])
    layers = {name: layer.codes.shape for name, layer in written.items()}
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.g_idx"] = tensors[f"{LAYER}.g_idx"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weights = Llama._weights(Checkpoint(folder))
    parts = [
        weights.take_linear(f"layers.1.self_attn.{name}_proj", *layers[f"{ATTENTION}.{name}_proj"])
        for name in "qk"
    ]
    with pytest.raises(InvalidRequest, match=r"k_proj.*in different orders"):
        StackedWeight(parts).quantized()
