"""Two processes with an NPU each compute one model: their tokens are those of transformers."""

from pathlib import Path

import pytest

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
from tests.support.generic_models import GENERIC_MODELS, make_generic_checkpoint


@pytest.mark.parametrize(
    ("family", "dtype", "tie", "graphs"),
    [
        ("qwen2", "float16", 0.05, "off"),
        pytest.param("qwen2", "bfloat16", 0.1, "off", marks=pytest.mark.full),
        pytest.param("qwen2", "float16", 0.05, "on", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "float16", 0.05, "off", marks=pytest.mark.full),
    ],
)
async def test_two_ranks(
    family: str,
    dtype: str,
    tie: float,
    graphs: str,
    tmp_path: Path,
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "FAKE_NPU_COUNT", "2"
    )  # for the other rank; this process knows its first NPU already
    make = make_generic_checkpoint if family in GENERIC_MODELS else make_checkpoint
    folder = make(tmp_path, family)
    texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts(3, 400))]
    options = {"device": "npu", "dtype": dtype, "graphs": graphs, "max_num_seqs": 4}
    async with (
        running_decoder(folder, short_tmp / "s", tensor_parallel_size=2, **options) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        assert (decoder.loaded.worker.graphs is not None) == (graphs == "on")
        await NaiveScheduler(stream).generate(texts, 8, 64)
    reference = load_reference(folder)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=tie)
