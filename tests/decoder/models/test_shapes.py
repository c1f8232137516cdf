"""Drawn shapes of every decoder family, 1 to 32 sequences at once, with and without shared prefixes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "glm", "glm4", "chatglm", "internlm2")
NEW_TOKENS = 8
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One draw: a checkpoint and the way it is asked."""

    family: str
    text: dict[str, Any]
    block_size: int
    chunk: int
    sequences: int
    shared: int  # tokens that all prompts begin with


def rope(family: str, size: int, choose: Callable[..., Any]) -> dict[str, Any]:
    """One of ROPES, as far as the family has it; size: of a head."""
    if family == "qwen2_vl":
        quarter = size // 8
        return {**ROPES[0], "mrope_section": [quarter, quarter, size // 2 - 2 * quarter]}
    if family == "chatglm":
        return {**choose(*ROPES[:2]), "partial_rotary_factor": 0.5}
    parts = {"partial_rotary_factor": choose(0.25, 0.5, 1.0)} if family.startswith("glm") else {}
    return {**choose(*ROPES), **parts}


def draw(seed: int) -> Shape:
    numbers = np.random.default_rng(seed)

    def choose(*options: Any) -> Any:
        return options[int(numbers.integers(len(options)))]

    family = FAMILIES[seed % len(FAMILIES)]
    kv_heads, share, size = choose(1, 2, 3), choose(1, 2, 4, 7), choose(64, 80, 96, 128)
    if family.startswith("qwen2") and kv_heads * share * size > 1024:
        kv_heads = 1  # the hidden size follows from the heads here
    heads = kv_heads * share
    text: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": choose(1, 2, 3),
        "intermediate_size": choose(40, 96),
        "tie_word_embeddings": choose(True, False),
        "rope_parameters": rope(family, size, choose),
    }
    if family not in ("qwen2", "qwen2_vl"):
        text |= {"hidden_size": heads * choose(6, 8), "head_dim": size}
    else:
        text["hidden_size"] = heads * size
    if family in ("llama", "qwen3", "glm", "glm4", "chatglm", "internlm2"):
        text["attention_bias"] = choose(True, False)
    if family == "llama":
        text["mlp_bias"] = choose(True, False)
    if family == "chatglm":
        text["tie_word_embeddings"] = False
    if family == "mistral":
        text["sliding_window"] = choose(None, 5, 33)
    if family in ("qwen2", "qwen3") and choose(True, False):
        text |= {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}
    return Shape(
        family=family,
        text=text,
        block_size=choose(8, 16, 32),
        chunk=choose(3, 17, 64),
        sequences=choose(1, 2, 7, 32),
        shared=choose(0, 40),
    )


class SharingScheduler(NaiveScheduler):
    """Lets later texts begin with whole blocks of the first one, as a prefix cache does."""

    def share(self, leader: Text, texts: list[Text], tokens: int) -> None:
        """The leader has computed at least `tokens`."""
        count = tokens // self.stream.hello.block_size
        for text in texts:
            text.blocks = leader.blocks[:count]
            text.computed = count * self.stream.hello.block_size

    def grow(self, text: Text, tokens: int, plan: dict[str, list[int]]) -> None:
        """The first edit of a text names the shared blocks as well."""
        if text.blocks and not text.output and text.slot not in self._told:
            self._told.add(text.slot)
            plan["edit_slot"].append(text.slot)
            plan["edit_index"].append(0)
            plan["edit_len"].append(len(text.blocks))
            plan["edit_blocks"] += text.blocks
        self._told.add(text.slot)
        super().grow(text, tokens, plan)

    def __init__(self, stream: StepStream) -> None:
        super().__init__(stream)
        self._told: set[int] = set()


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=() if n < len(FAMILIES) else pytest.mark.full) for n in range(20)],
)
async def test_tokens_are_those_of_transformers(seed: int, tmp_path: Path, short_tmp: Path) -> None:
    shape = draw(seed)
    folder = make_checkpoint(tmp_path, shape.family, text=shape.text)
    numbers = np.random.default_rng(seed)
    start = numbers.integers(0, 400, shape.shared).tolist()
    prompts = [
        [*start, *numbers.integers(0, 400, numbers.integers(1, 60)).tolist()]
        for _ in range(shape.sequences)
    ]
    texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts)]
    settings = {"block_size": shape.block_size, "max_num_batched_tokens": 4096}
    async with (
        running_decoder(
            folder, short_tmp / "s", kv_cache_memory_bytes=64 << 20, **settings
        ) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        scheduler = SharingScheduler(stream)
        await scheduler.generate(texts[:1], NEW_TOKENS, shape.chunk)
        scheduler.share(texts[0], texts[1:], shape.shared)
        await scheduler.generate(texts, NEW_TOKENS, shape.chunk)
    reference = load_reference(folder)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output)
