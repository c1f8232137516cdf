"""Requests with a grammar, by scheduler and real decoder: choices, endings, preemption, cancels, refusals."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from shared.queue.token_log import decode_tokens
from tessera.common.v1 import ending_pb2
from tests.support.checkpoints import make_checkpoint
from tests.support.scheduler_bench import Bench

# At least nine tokens with the tokenizer of the checkpoint.
PATTERN = r"(ab|c|\[[0-9]{2}\]){9,30}\."
GRAMMAR = f"start: /{PATTERN}/"
PROMPTS = [[5, 9, 33, 60], list(range(40, 90)), [7, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def words(folder: Path) -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return found


def options(words: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    ends = [words.eos_token_id]
    return {"grammar": GRAMMAR, "max_tokens": 200, "stop_token_ids": ends, **changes}


def text_of(words: PreTrainedTokenizerFast, records: bytes) -> str:
    return str(words.decode(decode_tokens(records), skip_special_tokens=True))


@pytest.mark.parametrize("changes", [{"n": 3}, {"n": 2, "best_of": 4, "logprobs": 0}])
async def test_every_choice_follows_the_grammar_to_its_end(
    bench: Bench,
    folder: Path,
    words: PreTrainedTokenizerFast,
    short_tmp: Path,
    changes: dict[str, Any],
) -> None:
    await bench.real_decoder(folder, short_tmp / "d")
    bench.scheduler()
    given = options(words, temperature=1.5, seed=7, **changes)
    stride = 12 if "logprobs" in changes else 4
    rids = [await bench.ask(prompt, **given) for prompt in PROMPTS]
    texts = set()
    for rid in rids:
        for records, ending in await bench.answers(rid, changes["n"], stride):
            assert ending.reason == ending_pb2.FINISH_REASON_STOP
            tokens = decode_tokens(records, stride)
            texts.add(words.decode(tokens, skip_special_tokens=True))
            assert tokens[-1] == words.eos_token_id
    assert all(re.fullmatch(PATTERN, text) for text in texts) and len(texts) > 3


async def test_length_and_stop_strings_cut_an_answer_and_min_tokens_yields(
    bench: Bench, folder: Path, words: PreTrainedTokenizerFast, short_tmp: Path
) -> None:
    await bench.real_decoder(folder, short_tmp / "d")
    bench.scheduler()
    whole, ending = await bench.answer(await bench.ask(PROMPTS[0], **options(words)))
    assert ending.reason == ending_pb2.FINISH_REASON_STOP and len(whole) > 8
    rids = [
        await bench.ask(PROMPTS[0], **options(words, **changes))
        for changes in (
            {"max_tokens": 5},
            {"stop": [words.decode(whole[3:5])]},
            {"min_tokens": 190},
        )
    ]
    (short, length), (_, stopped), (long, yielded) = [await bench.answer(rid) for rid in rids]
    assert length.reason == ending_pb2.FINISH_REASON_LENGTH and short == whole[:5]
    assert stopped.stop == words.decode(whole[3:5])
    assert yielded.reason == ending_pb2.FINISH_REASON_STOP and long[-1] == words.eos_token_id
    assert len(long) < 190 and re.fullmatch(PATTERN, words.decode(long[:-1]))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempted_outputs_are_those_of_requests_alone(
    bench: Bench, folder: Path, words: PreTrainedTokenizerFast, short_tmp: Path, mode: str
) -> None:
    decoder = await bench.real_decoder(
        folder,
        short_tmp / "d",
        kv_cache_memory_bytes=96 << 10,
        num_host_blocks=64,
        max_model_len=96,
    )
    bench.scheduler(preemption_mode=mode)
    given = options(words, n=2, temperature=1.1, seed=3, max_tokens=40)
    given["grammar"] = "start: /[a-e ]{100,200}/"
    alone = [await bench.answers(await bench.ask(prompt, **given), 2) for prompt in PROMPTS]
    rids = [await bench.ask(prompt, **given) for prompt in PROMPTS for _ in range(2)]
    together = [await bench.answers(rid, 2) for rid in rids]
    for number, answers in enumerate(together):
        expected = [records for records, _ in alone[number // 2]]
        assert [records for records, _ in answers] == expected
        assert all(re.fullmatch("[a-e ]+", text_of(words, records)) for records, _ in answers)
    block = decoder.loaded.worker.limits.block_size
    needed = sum(-(-(len(p) + 40) // block) for p in PROMPTS) * 4
    assert needed > decoder.loaded.worker.limits.num_blocks, "the test must be tight"


async def test_a_wrong_grammar_ends_its_request_alone_and_cancels_leave_nothing(
    bench: Bench, folder: Path, words: PreTrainedTokenizerFast, short_tmp: Path
) -> None:
    decoder = await bench.real_decoder(folder, short_tmp / "d")
    bench.scheduler()
    good = await bench.ask(PROMPTS[0], **options(words))
    bad = await bench.ask(PROMPTS[1], **options(words, grammar="start: (", n=2))
    long = options(words, grammar="start: /[a-e]{500,600}/", max_tokens=400)
    endless = await bench.ask(PROMPTS[2], **long)
    for records, ending in await bench.answers(bad, 2):
        assert not records and ending.reason == ending_pb2.FINISH_REASON_ERROR
        assert ending.failure.reason == "INVALID_GRAMMAR" and "grammar" in ending.failure.message
    tokens, ending = await bench.answer(good)
    assert ending.reason == ending_pb2.FINISH_REASON_STOP
    assert re.fullmatch(PATTERN, words.decode(tokens[:-1]))
    async with asyncio.timeout(60):
        while await bench.redis.strlen(bench.keys.log(endless, 0)) < 40:
            await asyncio.sleep(0.01)
    await bench.queue.cancel(endless)
    tokens, _ = await bench.answer(endless)
    assert re.fullmatch("[a-e]+", words.decode(tokens))
    async with asyncio.timeout(60):
        while not decoder.loaded.worker.slots.empty:
            await asyncio.sleep(0.01)
