"""Answers follow a checkpoint's generation_config.json as those of `generate` do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from services.launcher.redis.embedded_redis import EmbeddedRedis
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.processes.services_in_process import services_in_process

pytestmark = pytest.mark.timeout(600)
PROMPTS = ([5, 9, 33, 60, 12, 7, 41], [80, 80, 80, 80], [23, 6, 90, 11, 50, 17, 19, 70, 8, 14, 35])


def generated(folder: Path, count: int, **more: Any) -> list[list[int]]:
    """What `generate` gives, with the folder's generation_config.json."""
    model = load_reference(folder)
    with torch.no_grad():
        outputs = [
            model.generate(torch.tensor([prompt]), max_new_tokens=count, **more)[0, len(prompt) :]
            for prompt in PROMPTS
        ]
    return [output.tolist() for output in outputs]


def test_answers_are_those_of_generate(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "llama")
    plain = generated(folder, 24, do_sample=False)
    config = {
        "do_sample": False,
        "eos_token_id": [plain[0][5], plain[1][3]],
        "pad_token_id": 0,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [plain[0][2], 100_000],
        "begin_suppress_tokens": [plain[1][0], plain[2][0]],
        "bad_words_ids": [[plain[2][1], plain[2][2]], [plain[2][4]]],
        "min_new_tokens": 9,
        "repetition_penalty": 1.1,
        "typical_p": 0.5,
    }
    (folder / "generation_config.json").write_text(json.dumps(config))
    expected = generated(folder, 24)
    assert all(left != right[: len(left)] for left, right in zip(expected, plain, strict=True))
    with (
        services_in_process(folder, redis_server.url) as system,
        OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=90) as client,
    ):
        answers: Any = client.completions.create(
            model="tiny",
            prompt=[list(prompt) for prompt in PROMPTS],
            max_tokens=24,
            extra_body={"return_token_ids": True},
        )
        alone: Any = client.completions.create(
            model="tiny",
            prompt=list(PROMPTS[0]),
            max_tokens=24,
            extra_body={"return_token_ids": True, "bad_token_ids": [], "min_tokens": 0},
        )
    assert [choice.token_ids for choice in answers.choices] == expected
    assert alone.choices[0].token_ids[:3] != expected[0][:3], "a request's own values go before"
