"""Decoders whose keys and values are codes of 8 bits."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.decoder.devices.cuda.device import CudaDevice
from services.decoder.loading.load import Loaded, load
from services.decoder.settings import DecoderSettings
from services.families.check import Parts, require_servable
from services.scheduler.decoders.convert import capacity_of
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.plans import go_on, new_text, whole_prompt
from tests.support.decoder.prompts_step import run_next, run_prompts
from tests.support.decoder.step_stream import (
    StepStream,
    greedy,
    make_plan,
    read_floats,
    read_ints,
    running_decoder,
)

PROMPT = [(17 * place) % 400 for place in range(37)]


def loaded_with(folder: Path, kind: str, **changes: Any) -> Loaded:
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    return load(DecoderSettings.model_validate({**values, "kv_cache_dtype": kind, **changes}))


def log_probabilities(loaded: Loaded) -> torch.Tensor:
    found = read_floats(run_prompts(loaded.worker, greedy(logprobs=0)).logprobs)
    return torch.tensor(found + read_floats(run_next(loaded.worker, [0, 1, 2]).logprobs))


@pytest.mark.parametrize("backend", [ModelBackend.NATIVE, ModelBackend.TRANSFORMERS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_of_codes_says_what_another_says(
    llama_folder: Path, backend: ModelBackend, dtype: str
) -> None:
    found = {}
    for kind in ("auto", "int8"):
        with capture_logs() as logs:
            loaded = loaded_with(llama_folder, kind, dtype=dtype, model_backend=backend)
        [line] = [line for line in logs if line["event"] == "allocating cache"]
        found[kind] = loaded, line, log_probabilities(loaded)
    (plain, numbers, expected), (coded, codes, near) = found["auto"], found["int8"]
    assert 0 < (near - expected).abs().max() < 0.15
    assert coded.fingerprint != plain.fingerprint and coded.content == plain.content
    assert coded.row_invariant == plain.row_invariant
    assert (numbers["kv_dtype"], codes["kv_dtype"]) == (dtype, "int8")
    assert codes["tokens"] > (1.5 if dtype == "bfloat16" else 3) * numbers["tokens"]  # small heads


def test_large_biases_of_keys_stay_as_they_are(tmp_path: Path) -> None:
    """As in Qwen2, where they are a hundred times larger than what a text adds to them."""
    folder = make_checkpoint(tmp_path / "qwen2", "qwen2")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.bias"
    tensors[name][3] = 600
    save_file(tensors, path, metadata={"format": "pt"})
    for backend in (ModelBackend.NATIVE, ModelBackend.TRANSFORMERS):
        plain, coded = (
            loaded_with(folder, kind, dtype="float32", model_backend=backend)
            for kind in ("auto", "int8")
        )
        assert coded.worker.model.layers[0].kept != () == coded.worker.model.layers[1].kept  # type: ignore[union-attr]
        off = (log_probabilities(coded) - log_probabilities(plain)).abs().max()
        assert 0 < off < 0.15, backend


def test_what_cannot_have_codes_is_refused_by_its_flag(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="fp8"):
        loaded_with(llama_folder, "fp8")
    monkeypatch.setattr("services.families.check.require_computable", lambda *_: None)
    monkeypatch.setattr("services.families.check.resolve_device", lambda name: name)
    with pytest.raises(InvalidRequest, match=r"--kv-cache-dtype int8: .*not for cuda"):
        require_servable(llama_folder, parts=Parts.WEIGHTS, device="cuda", kv_cache="int8")
    with pytest.raises(InvalidRequest, match="on cuda nothing attends to codes"):
        CudaDevice.require_kv_cache(CudaDevice.__new__(CudaDevice), "int8")
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", "none")
    with pytest.raises(InvalidRequest, match="the CPU kernels are needed"):
        loaded_with(llama_folder, "int8", threads=3)


@pytest.fixture
async def stream(llama_folder: Path, short_tmp: Path) -> AsyncIterator[StepStream]:
    options: dict[str, Any] = {"num_host_blocks": 8, "kv_cache_dtype": "int8"}
    async with (
        running_decoder(llama_folder, short_tmp / "s", **options) as decoder,
        StepStream.open(decoder.address) as opened,
    ):
        assert capacity_of(opened.hello).kv_cache_dtype == "int8"  # a part of blocks' names
        yield opened


async def test_text_goes_on_alike_in_pieces_behind_a_prefix_and_after_swaps(
    stream: StepStream,
) -> None:
    begun = make_plan(**new_text(PROMPT, 0, [1, 2, 3, 4]), **whole_prompt(PROMPT, 0))
    first = read_ints((await stream.run(begun)).tokens)
    expected = await go_on(stream, 0, len(PROMPT), 8)
    # Behind two blocks that another sequence has computed, in two pieces.
    await stream.run(
        make_plan(**new_text(PROMPT, 1, [1, 2, 5, 6]), row_slot=[1], row_start=[32], row_count=[2])
    )
    last = make_plan(row_slot=[1], row_start=[34], row_count=[3], sample_row=[0], sample_slot=[1])
    assert read_ints((await stream.run(last)).tokens) == first
    assert await go_on(stream, 1, len(PROMPT), 4) == expected[:4]
    # Out to the host, and back to other blocks.
    await stream.run(
        make_plan(
            edit_slot=[1], edit_index=[0], edit_len=[0], edit_blocks=[],
            swap_out_device=[1, 2, 5], swap_out_host=[7, 0, 3],
        )
    )  # fmt: skip
    await stream.run(
        make_plan(
            edit_slot=[1], edit_index=[0], edit_len=[4], edit_blocks=[11, 12, 13, 14],
            swap_in_host=[7, 0, 3], swap_in_device=[11, 12, 13],
        )
    )  # fmt: skip
    assert await go_on(stream, 1, len(PROMPT) + 4, 4) == expected[4:]
    # Resumed: all of it as a prompt, in one piece.
    text = [*PROMPT, *first, *expected[:4]]
    result = await stream.run(
        make_plan(**new_text(text, 2, [7, 8, 9, 10]), **whole_prompt(text, 2))
    )
    assert read_ints(result.tokens) == expected[4:5]
    assert await go_on(stream, 2, len(text), 3) == expected[5:]
