"""A model whose prompts see themselves whole, under the scheduler: tokens are those of the reference implementation."""

from pathlib import Path

import pytest

from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.queue.token_log import decode_tokens
from tests.reference_models.common import Generated
from tests.reference_models.text_models.chatglm_6b import ChatGlm6B, write_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.scheduler_bench import Bench

NEW_TOKENS = 24
MAX_LEN = 128
TEXTS = [
    "What?",
    "The red circle",
    "The red circle stands left of the blue square. " * 2,
    "What is",
]
TEXTS += [f"{text} And {text}" for text in TEXTS[:2]] + ["A cat", "图中有一个红色的圆形"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("chatglm-6b") / "model")


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[tuple[list[int], Generated]]:
    """Prompts, and what the reference says to each."""
    reference = ChatGlm6B(folder)
    prompts = [reference.prompt_ids([("user", text)]) for text in TEXTS]
    return [(prompt, reference.generate(prompt, NEW_TOKENS)) for prompt in prompts]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_eight_requests_of_two_choices_in_a_small_cache(
    bench: Bench,
    folder: Path,
    asked: list[tuple[list[int], Generated]],
    short_tmp: Path,
    mode: str,
) -> None:
    """Forked, preempted, and the second time behind what is cached of equal prompts."""
    decoder = await bench.real_decoder(
        folder,
        short_tmp / "d",
        kv_cache_memory_bytes=MAX_LEN * _token_bytes(folder) + (64 << 10),
        num_host_blocks=64,
        max_model_len=MAX_LEN,
    )
    limits = decoder.loaded.worker.limits
    needed = sum(-(-(len(prompt) + NEW_TOKENS) // limits.block_size) for prompt, _ in asked) * 2
    assert needed > limits.num_blocks, "the test must be tight"
    bench.scheduler(preemption_mode=mode)
    for _ in range(2):
        rids = [await bench.ask(prompt, max_tokens=NEW_TOKENS, n=2) for prompt, _ in asked]
        for rid, (_, expected) in zip(rids, asked, strict=True):
            for records, _ in await bench.answers(rid, 2):
                assert_same_up_to_ties(decode_tokens(records), expected.tokens, expected.logits)


def _token_bytes(folder: Path) -> int:
    config = registry.decoder_config(Checkpoint(folder))
    return 2 * 4 * config.num_layers * config.num_heads * config.head_size
