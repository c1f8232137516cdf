"""A decoder with weights of codes on an NPU says what transformers says with the numbers that these mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from services.decoder.devices.npu.device import NpuDevice
from services.families.check import Parts, require_servable
from shared.weights.linear_weight import in_memory
from shared.weights.on_the_fly import quantize
from shared.weights.scheme import HEAD, SMALL, Scheme, find_scheme
from tests.decoder.models.test_tokens import prompts
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.checkpoints.coded import Coded, write_coded
from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

# Largest difference of two logits that may change places: of steps of 16 bits, and of activations of 8.
TIE, TIE_OF_WHOLE = 0.08, 0.3
LAYERS = 9  # four of each of two, and the head
# Heads that are not filled up, and cuts between groups: else codes are made of others.
TEXT = {
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
}


async def generate(folder: Path, socket: Path, layers: int, **options: Any) -> list[Text]:
    """Checks how many layers have stayed codes."""
    given = {"device": "npu", "dtype": "float16", "graphs": "off", "max_num_seqs": 4, **options}
    texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts(3, 400))]
    with capture_logs() as logs:
        async with (
            running_decoder(folder, socket, **given) as decoder,
            StepStream.open(decoder.address) as stream,
        ):
            assert (decoder.loaded.worker.graphs is not None) == (given["graphs"] == "on")
            await NaiveScheduler(stream).generate(texts, 8, 64)
    [line] = [line for line in logs if line["event"] == "quantized weights"]
    assert line["layers"] == layers and line["mb"] <= line["mb_before"]
    return texts


WAYS = [
    Coded("awq"),
    Coded("gptq", symmetric=True, ordered=True),
    pytest.param(Coded("gptq", bits=8, group=0, symmetric=True), marks=pytest.mark.full),
    pytest.param(Coded("pack-quantized", symmetric=True), marks=pytest.mark.full),
    pytest.param(Coded("pack-quantized", bits=8, group=0), marks=pytest.mark.full),
    pytest.param(Coded("int-quantized", bits=8), marks=pytest.mark.full),
]


@pytest.mark.parametrize("how", WAYS, ids=str)
async def test_stored_codes(tmp_path: Path, short_tmp: Path, how: Coded) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    write_coded(tmp_path / "coded", dense, how)
    texts = await generate(tmp_path / "coded", short_tmp / "s", LAYERS - 1)
    reference = load_reference(dense)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=TIE)


def quantized(model: PreTrainedModel, scheme: Scheme) -> PreTrainedModel:
    """With the numbers that codes of this scheme mean."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            codes = quantize(in_memory(module.weight.data), HEAD if name == "lm_head" else scheme)
            module.weight = torch.nn.Parameter(codes.dequantize(torch.float32))
    return model


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {}),
        ("int4g32", {"graphs": "on"}),
        ("int4g32", {"tensor_parallel_size": 2}),
        pytest.param("int8", {"graphs": "on", "dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param("int8g128", {}, marks=pytest.mark.full),
    ],
)
async def test_codes_that_are_made_at_loading(
    tmp_path: Path,
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("FAKE_NPU_COUNT", str(options.get("tensor_parallel_size", 1)))
    folder = make_checkpoint(tmp_path, "llama", text=TEXT)
    texts = await generate(folder, short_tmp / "s", LAYERS, quantization=name, **options)
    scheme = find_scheme(name, SMALL)
    assert scheme is not None
    reference = quantized(load_reference(folder), scheme)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=TIE)


async def test_activations_of_8_bits(tmp_path: Path, short_tmp: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", text=TEXT)
    texts = await generate(folder, short_tmp / "s", LAYERS, quantization="int8-fast")
    reference = quantized(load_reference(folder), HEAD)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=TIE_OF_WHOLE)


def test_every_scheme_is_served_on_a_910b(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    for name in ("int8", "int8-fast", "int4"):
        told: dict[str, Any] = {"parts": Parts.WEIGHTS, "device": "npu", "quantization": name}
        require_servable(folder, **told)
        NpuDevice.require_scheme(NpuDevice.__new__(NpuDevice), name)
