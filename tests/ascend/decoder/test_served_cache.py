"""A decoder whose keys and values are codes of 8 bits on an NPU says what transformers says, or its flag is refused."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.decoder.devices.npu.device import NpuDevice
from services.decoder.loading.graphs import graph_bytes
from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.families.check import Parts, require_servable
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from tests.ascend.decoder.test_coded_cache import FAULTS, with_fault
from tests.decoder.models.test_tokens import prompts
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

TIE = 0.15  # the largest difference of two logits that may change places


@pytest.fixture(autouse=True)
def _nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def generate(
    folder: Path, socket: Path, *, has_graphs: bool | None = None, **options: Any
) -> list[Text]:
    given = {"device": "npu", "dtype": "float16", "graphs": "off", "max_num_seqs": 4, **options}
    texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts(3, 400))]
    with capture_logs() as logs:
        async with (
            running_decoder(folder, socket, kv_cache_dtype="int8", **given) as decoder,
            StepStream.open(decoder.address) as stream,
        ):
            expected = given["graphs"] == "on" if has_graphs is None else has_graphs
            assert (decoder.loaded.worker.graphs is not None) == expected
            assert stream.hello.kv_cache_dtype == "int8"  # a part of blocks' names
            await NaiveScheduler(stream).generate(texts, 8, 64)
    [line] = [line for line in logs if line["event"] == "allocating cache"]
    assert line["kv_dtype"] == "int8"
    return texts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("llama", {"graphs": "on"}, id="graphs"),
        pytest.param("qwen2", {"graphs": "on"}, id="large biases"),
        pytest.param("llama", {"tensor_parallel_size": 2}, id="ranks"),
        pytest.param(
            "llama",
            {"model_backend": ModelBackend.TRANSFORMERS, "skip_model_check": True},
            id="transformers",
        ),
        pytest.param("mistral", {"graphs": "on", "has_graphs": False}, id="windows"),
        pytest.param("llama", {"dtype": "bfloat16"}, id="bfloat16", marks=pytest.mark.full),
    ],
)
async def test_a_decoder_of_codes_says_what_transformers_says(
    tmp_path: Path,
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("FAKE_NPU_COUNT", str(options.get("tensor_parallel_size", 1)))
    folder = make_checkpoint(tmp_path, kind)
    if kind == "qwen2":  # with a bias a hundred times larger than what a text adds to it
        path, name = folder / "model.safetensors", "model.layers.0.self_attn.k_proj.bias"
        tensors = load_file(path)
        tensors[name][3] = 300
        save_file(tensors, path, metadata={"format": "pt"})
    texts = await generate(folder, short_tmp / "s", **options)
    reference = load_reference(folder)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=TIE)


def loaded(folder: Path, kind: str, **options: Any) -> Any:
    given = {"model": folder, "device": "npu", "dtype": "float16", "graphs": "off"}
    given |= {"kv_cache_memory_bytes": 16 << 20, **options}
    return load(DecoderSettings.model_validate({**given, "kv_cache_dtype": kind}))


@pytest.mark.parametrize(("graphs", "level"), [("on", "warning"), ("auto", "info")])
def test_layers_with_windows_over_codes_have_no_graphs(
    tmp_path: Path, graphs: str, level: str
) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    with capture_logs() as logs:
        decoder = loaded(folder, "int8", graphs=graphs)
    assert decoder.worker.graphs is None
    [said] = [line for line in logs if line["event"] == "no graphs"]
    assert "--kv-cache-dtype int8" in said["reason"] and said["log_level"] == level
    layer = decoder.worker.model.layers[0]
    assert layer.coded and layer.window
    limits = (decoder.worker.limits.max_slots, decoder.worker.limits.max_model_len)
    assert graph_bytes(graphs, decoder.worker.model, decoder.device, *limits) == 0


def test_a_cache_of_codes_has_another_fingerprint_and_more_tokens(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", text={"head_dim": 64})
    plain, coded = (loaded(folder, kind, num_host_blocks=4) for kind in ("auto", "int8"))
    assert plain.fingerprint != coded.fingerprint and plain.content == coded.content
    ops, model = coded.device.ops, coded.worker.model
    assert all(layer.coded for layer in model.layers)
    numbers, codes = (
        each.device.ops.block_bytes(each.worker.model.layers[0]) for each in (plain, coded)
    )
    assert numbers / codes == 128 / 68  # with a scale for every 64 codes
    # Prompts are computed with numbers that are made of the codes of a whole sequence.
    [longest] = {coded.device.attention_bytes(layer, 1000) for layer in model.layers}
    assert longest > 1000 * 2 * ops.head_width(64) * ops.dtype.itemsize
    assert plain.device.attention_bytes(plain.worker.model.layers[0], 1000) == 0


def test_memory_is_left_for_the_numbers_of_the_longest_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    before = loaded(folder, "int8").profile.step_bytes
    of_longest = NpuDevice.attention_bytes
    monkeypatch.setattr(NpuDevice, "attention_bytes", lambda *given: of_longest(*given) + (1 << 30))
    assert loaded(folder, "int8").profile.step_bytes == before + (1 << 30)


def test_where_attention_to_codes_is_wrong_the_decoder_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, FAULTS["scales of one head"], ("BSND", "BNSD"))
    folder = make_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(InvalidRequest, match="--kv-cache-dtype int8: no form"):
        loaded(folder, "int8")
    loaded(folder, "auto")


def test_a_310p_refuses_codes_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    told: dict[str, Any] = {"parts": Parts.WEIGHTS, "device": "npu", "kv_cache": "int8"}
    require_servable(folder, **told)
    device = NpuDevice.__new__(NpuDevice)
    device.require_kv_cache("int8")
    for module in ("services.families.check", "services.decoder.devices.npu.device"):
        monkeypatch.setattr(f"{module}.is_310p", lambda: True)
    for refuse in (
        lambda: require_servable(folder, **told),
        lambda: device.require_kv_cache("int8"),
    ):
        with pytest.raises(InvalidRequest, match="--kv-cache-dtype int8: on an Ascend 310P"):
            refuse()
