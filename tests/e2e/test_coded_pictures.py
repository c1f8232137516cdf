"""A checkpoint of which every linear layer is quantized, those of the vision encoder too, through the real services:
the tokens of transformers for the numbers that codes stand for."""

import asyncio
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI

from tests.e2e.test_reference import Reference, ask, conversations
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.coded import EVERY_LINEAR, write_layers
from tests.support.checkpoints.float8 import Float8
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.processes.services_in_process import services_in_process


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("llava", marks=pytest.mark.full)])
def test_prompts_with_pictures_give_the_tokens_of_the_numbers(
    family: str, tmp_path: Path, redis_url: str
) -> None:
    torch.set_num_threads(1)
    how = Float8("compressed-tensors", None)
    folder, dense = tmp_path / "under-test", make_checkpoint(tmp_path / "dense", family)
    names = write_layers(folder, dense, how.stored, how.config(), EVERY_LINEAR)
    assert any("vis" in name for name in names)
    reference = Reference(dense)
    chats = [chat for chat in conversations(3, False)[1:8] if len(chat[-1]["content"]) > 1]

    async def ask_all(url: str) -> list[tuple[list[int], list[int]]]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, chat, stream=True) for chat in chats))

    with services_in_process(folder, redis_url) as system:
        answers = asyncio.run(ask_all(system.base_url))
    for chat, (prompt, generated) in zip(chats, answers, strict=True):
        expected_prompt, expected, logits = reference(chat)
        assert prompt == expected_prompt
        assert_same_up_to_ties(generated, expected, logits)
