"""Every native decoder, and families that the code of transformers runs, under the scheduler.

Tokens are those of transformers in a batch, in pieces, forked, preempted, and behind a prefix that is cached.
"""

from pathlib import Path

import numpy as np
import pytest

from shared.queue.token_log import decode_tokens
from tests.support.checkpoints import TEXT_FAMILIES, load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.generic_models import GENERIC_MODELS, each, make_generic_checkpoint
from tests.support.scheduler_bench import Bench

NEW_TOKENS = 24
MAX_LEN = 96
SHARED = np.random.default_rng(0).integers(0, 400, 33).tolist()
PROMPTS = [
    [*(SHARED if i % 2 else []), *np.random.default_rng(i).integers(0, 400, 1 + 5 * i).tolist()]
    for i in range(8)
]


def cache_bytes(family: str) -> int:
    """Of about twenty blocks."""
    if family.startswith("deepseek"):
        return 1000 << 10
    return (320 if family in GENERIC_MODELS else 160) << 10


@pytest.mark.parametrize("family", each(sorted({*TEXT_FAMILIES, *GENERIC_MODELS})))
@pytest.mark.parametrize("mode", ["recompute", pytest.param("swap", marks=pytest.mark.full)])
async def test_eight_requests_of_two_choices_in_a_small_cache(
    bench: Bench, tmp_path: Path, short_tmp: Path, family: str, mode: str
) -> None:
    make = make_generic_checkpoint if family in GENERIC_MODELS else make_checkpoint
    folder = make(tmp_path / "model", family)
    decoder = await bench.real_decoder(
        folder,
        short_tmp / "d",
        kv_cache_memory_bytes=cache_bytes(family),
        num_host_blocks=64,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=16,
    )
    limits = decoder.loaded.worker.limits
    needed = sum(-(-(len(prompt) + NEW_TOKENS) // limits.block_size) for prompt in PROMPTS)
    assert needed > limits.num_blocks, "the test must be tight"
    bench.scheduler(preemption_mode=mode)
    reference = load_reference(folder)
    for _ in range(2):
        rids = [await bench.ask(prompt, max_tokens=NEW_TOKENS, n=2) for prompt in PROMPTS]
        for rid, prompt in zip(rids, PROMPTS, strict=True):
            answers = [decode_tokens(records) for records, _ in await bench.answers(rid, 2)]
            assert answers[0] == answers[1]
            assert_greedy(reference, prompt, answers[0])
