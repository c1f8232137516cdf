"""Several processes that compute one model: tokens are those of one."""

from pathlib import Path

import pytest

from tests.support.checkpoints import load_reference
from tests.support.decoder.greedy_reference import (
    assert_greedy,
    assert_same_up_to_ties,
    greedy_tokens,
)
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)
from tests.support.generic_models import make_generic_checkpoint

PROMPTS = [[5, 9, 200, 31], list(range(40, 75)), [7]]


async def test_two_processes_generate_what_transformers_does(
    llama_folder: Path, short_tmp: Path
) -> None:
    await check_tokens(llama_folder, short_tmp)


@pytest.mark.full
async def test_two_processes_by_the_code_of_transformers(tmp_path: Path, short_tmp: Path) -> None:
    await check_tokens(make_generic_checkpoint(tmp_path, "gemma2"), short_tmp)


async def check_tokens(folder: Path, short_tmp: Path) -> None:
    reference = load_reference(folder)
    texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(PROMPTS)]
    async with (
        running_decoder(folder, short_tmp / "s", tensor_parallel_size=2) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        assert stream.hello.ranks == 2
        await NaiveScheduler(stream).generate(texts, 12, 16)
    for text in texts:
        expected, logits = greedy_tokens(reference, text.prompt, 12)
        assert_same_up_to_ties(text.output, expected, logits)


@pytest.mark.full
async def test_two_processes_in_bfloat16(llama_folder: Path, short_tmp: Path) -> None:
    texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(PROMPTS)]
    async with (
        running_decoder(
            llama_folder, short_tmp / "s", tensor_parallel_size=2, dtype="bfloat16"
        ) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        await NaiveScheduler(stream).generate(texts, 12, 16)
    reference = load_reference(llama_folder)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=0.05)
