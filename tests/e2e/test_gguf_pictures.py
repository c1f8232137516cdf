"""A language model in a GGUF file beside its vision part (mmproj): the tokens that transformers gives of the checkpoint
that both were made of, with pictures."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from shared.checkpoint.gguf.prepared import prepared_folder
from tests.e2e.test_reference import NEW_TOKENS, Reference, ask, conversations
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.gguf_files import Types
from tests.support.checkpoints.mmproj_files import PLAIN, numbers_of, write_pair
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.processes.services_in_process import services_in_process

CASES: dict[str, tuple[dict[str, Any], Types]] = {
    "llava": ({"family": "llava"}, PLAIN),
    "llava-q8-qwen2": (
        {"family": "llava", "language": "qwen2", "config": {"vision_feature_layer": [-2, 1]}},
        {"": Kind.Q8_0},
    ),
    "internvl": ({"family": "internvl_chat", "language": "qwen2"}, PLAIN),
    "llava-next": ({"family": "llava_next"}, PLAIN),
    "qwen2-vl": ({"family": "qwen2_vl"}, {"": Kind.F16}),
    "qwen2.5-vl": ({"family": "qwen2_5_vl", "vision": {"window_size": 112}}, PLAIN),
}
BY_DEFAULT = {"llava"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.full) for n in CASES],
)
def test_pictures_give_the_tokens_of_transformers(
    name: str, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    made, types = CASES[name]
    checkpoint = make_checkpoint(tmp_path / "under-test", **made)
    files = tmp_path / "files" / "under-test"
    _, projector = write_pair(files, checkpoint, types)
    # Its bounds of a picture's size are the test's.
    if (checkpoint / "preprocessor_config.json").is_file():
        shutil.copy(checkpoint / "preprocessor_config.json", files)
    if types is not PLAIN:  # the numbers that transformers has are those of the file
        path = checkpoint / "model.safetensors"
        save_file(load_file(path) | numbers_of(projector, checkpoint), path, {"format": "pt"})
    reference = Reference(checkpoint)
    chats = conversations(most_images=3, with_videos=made["family"].startswith("qwen2"))

    async def ask_all(url: str) -> list[tuple[list[int], list[int]]]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = [ask(client, chat, stream=i % 2 == 0) for i, chat in enumerate(chats)]
            return await asyncio.gather(*asked)

    folder = prepared_folder(files)
    folder = folder.rename(folder.parent / "under-test")
    with services_in_process(folder, redis_url) as system:
        answers = asyncio.run(ask_all(system.base_url))
    ties = 0
    for chat, (prompt, generated) in zip(chats, answers, strict=True):
        expected_prompt, expected, logits = reference(chat)
        assert prompt == expected_prompt
        assert len(generated) == NEW_TOKENS
        assert_same_up_to_ties(generated, expected, logits)
        ties += generated != expected
    assert ties <= 1  # a tie is rare, not an excuse
