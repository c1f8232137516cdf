"""On an NPU the decoder's tokens are those of transformers."""

from pathlib import Path
from typing import Any

import pytest

from tests.decoder.models.test_tokens import OPTIONS, prompts
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

# Largest difference of two logits that may change places, where transformers computes in float32.
TIES = {"float16": 0.05, "bfloat16": 0.1}
_FIRST_OF_A_FAMILY = [
    number
    for number, (family, _) in enumerate(OPTIONS)
    if family not in [other for other, _ in OPTIONS[:number]]
]
# Head sizes that the attention kernel knows, and some that are filled up or take its other layout.
HEAD_SIZES = (pytest.param(64, marks=pytest.mark.full), 128, 80, 256)


async def check(
    folder: Path,
    socket: Path,
    dtype: str = "float16",
    *,
    chunk: int = 64,
    longest: int = 90,
    graphs: str = "off",
) -> None:
    """Generates on the NPU, and looks for each token in what transformers would have chosen."""
    options = {"device": "npu", "dtype": dtype, "graphs": graphs, "max_num_seqs": 4}
    async with (
        running_decoder(folder, socket, **options) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        assert (decoder.loaded.worker.graphs is not None) == (graphs == "on")
        assert stream.hello.block_size == 128
        vocabulary = decoder.loaded.worker._model.config.vocab_size
        texts = [
            Text(slot, prompt, greedy())
            for slot, prompt in enumerate(prompts(3, vocabulary, longest))
        ]
        await NaiveScheduler(stream).generate(texts, 8, chunk)
    reference = load_reference(folder)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=TIES[dtype])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(*option, marks=() if number in _FIRST_OF_A_FAMILY else pytest.mark.full)
        for number, option in enumerate(OPTIONS)
    ],
)
async def test_families_and_options_in_float16(
    tmp_path: Path, short_tmp: Path, family: str, options: dict[str, Any]
) -> None:
    await check(make_checkpoint(tmp_path, family, **options), short_tmp / "s")


@pytest.mark.full
@pytest.mark.parametrize("number", _FIRST_OF_A_FAMILY)
async def test_families_from_graphs(tmp_path: Path, short_tmp: Path, number: int) -> None:
    family, options = OPTIONS[number]
    folder = make_checkpoint(tmp_path, family, **options)
    await check(folder, short_tmp / "s", chunk=256, graphs="on")


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
async def test_families_in_bfloat16(tmp_path: Path, short_tmp: Path, family: str) -> None:
    await check(make_checkpoint(tmp_path, family), short_tmp / "s", "bfloat16", chunk=17)


@pytest.mark.parametrize("size", HEAD_SIZES)
async def test_heads_of_every_size_over_many_blocks_in_chunks(
    tmp_path: Path, short_tmp: Path, size: int
) -> None:
    text = {"head_dim": size, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_checkpoint(tmp_path, "llama", text={**text, "max_position_embeddings": 512})
    await check(folder, short_tmp / "s", chunk=100, longest=300)


@pytest.mark.parametrize("graphs", ["off", pytest.param("on", marks=pytest.mark.full)])
async def test_a_window_over_many_blocks(tmp_path: Path, short_tmp: Path, graphs: str) -> None:
    text = {"sliding_window": 130, "max_position_embeddings": 512}
    folder = make_checkpoint(tmp_path, "mistral", text=text)
    await check(folder, short_tmp / "s", chunk=100, longest=300, graphs=graphs)
