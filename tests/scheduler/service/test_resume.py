"""Requests of every kind, with the scheduler killed and the decoder cut off at moments that are drawn: all must come
out as if nothing had been. A real decoder in float32, whose rows do not depend on their company.
"""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from shared.errors import Unavailable
from shared.net.channels import open_channel
from shared.queue.token_log import decode_tokens, stride
from tessera.common.v1.pooling_pb2 import (
    POOLED_ROWS_LAST,
    POOLED_ROWS_MEAN,
    PoolingHead,
    PoolingParams,
)
from tessera.scheduler.v1.scheduler_pb2 import GetLoadRequest
from tessera.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.support.checkpoints import make_checkpoint
from tests.support.scheduler_bench import Bench

LENGTH = 120
WIDTH = 64  # of the checkpoint's hidden rows
GRAMMAR = 'start: ("red" | "blue" | "[" /[0-9]{1,3}/ "]"){30,90} "."'
# Name -> prompt's length and sampling.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (30, {}),
    "long prompt": (150, {}),
    "sampled": (11, {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 40}),
    "choices": (20, {"temperature": 1.0, "seed": 8, "n": 3}),
    "penalties": (
        17,
        {
            "temperature": 0.8,
            "seed": 9,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
        },
    ),
    "log-probabilities": (25, {"logprobs": 3, "n": 2, "temperature": 0.9, "seed": 10}),
    "scored prompt": (90, {"prompt_logprobs": 2, "logprobs": 1}),
    "best of": (13, {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 11, "logprobs": 0}),
    "beams": (19, {"n": 2, "best_of": 3, "use_beam_search": True, "max_tokens": 40}),
    "grammar": (14, {"grammar": GRAMMAR, "temperature": 1.2, "seed": 12, "n": 3}),
    "greedy grammar": (15, {"grammar": GRAMMAR, "logprobs": 1, "frequency_penalty": 0.3}),
    "bias and words": (9, {"logit_bias": {5: 2.0}, "bad_token_ids": [7], "temperature": 0.0}),
    "vector": (170, {"pooling": POOLED_ROWS_LAST}),
    "mean of all": (210, {"pooling": POOLED_ROWS_MEAN}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", dtype=torch.float32)


def prompt_of(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(3, 400), k=length)


def stride_of(sampling: dict[str, Any]) -> int:
    return stride(sampling.get("logprobs"), WIDTH if "pooling" in sampling else 0)


async def ask_all(bench: Bench, kinds: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, str]:
    rids = {}
    for number, (name, (length, sampling)) in enumerate(kinds.items()):
        options = {"max_tokens": LENGTH, **sampling}
        more = None
        if (rows := options.pop("pooling", None)) is not None:
            options["max_tokens"] = 1
            params = PoolingParams(rows=rows, head=PoolingHead.POOLING_HEAD_NONE, width=WIDTH)
            more = {"pooling": params}
        rids[name] = await bench.ask(prompt_of(number, length), more, **options)
    return rids


async def outcome(
    bench: Bench, kinds: dict[str, tuple[int, dict[str, Any]]], rids: dict[str, str]
) -> dict[str, Any]:
    """Logs and endings, as bytes: endings without cached tokens and times, which may differ."""
    found = {}
    for name, (_, sampling) in kinds.items():
        answers = await bench.answers(
            rids[name], sampling.get("n", 1), stride_of(sampling), timeout_s=120
        )
        for _, ending in answers:
            ending.cached_tokens = 0
            ending.ClearField("queued_us")
        found[name] = [answers, await bench.prompt_log(rids[name])]
    return found


async def logged(bench: Bench, rids: dict[str, str]) -> int:
    """Bytes of all logs."""
    total = 0
    for rid in rids.values():
        for choice in range(3):
            total += await bench.redis.strlen(bench.keys.log(rid, choice))
    return total


async def crash(bench: Bench, task: "asyncio.Task[int]") -> None:
    """Ends a scheduler without any message, and lets its lease run out."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    found: list[Any] = await bench.redis.zrange(f"{bench.keys.prefix}:scheds", 0, -1)
    for sid in found:
        await bench.redis.zadd(f"{bench.keys.prefix}:scheds", {sid: 1})


async def with_stops(
    bench: Bench, folder: Path, kinds: dict[str, tuple[int, dict[str, Any]]]
) -> dict[str, tuple[int, dict[str, Any]]]:
    """Adds requests that end by strings of what they generate anyway, which are several tokens long."""
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = prompt_of(0, KINDS["greedy"][0])
    tokens, _ = await bench.answer(await bench.ask(prompt, max_tokens=LENGTH))
    text = words.decode(tokens)
    middle = len(text) // 2
    stop = next(
        word for i in range(middle, len(text) - 6) if "\ufffd" not in (word := text[i : i + 6])
    )
    more = {"stop": [stop, "never to be seen"]}
    return {
        "greedy": kinds["greedy"],  # the number of a kind is that of its prompt
        **kinds,
        "late stop": (30, {**more, "min_tokens": LENGTH - 2}),
        "stop id": (30, {"stop_token_ids": [tokens[30]], "min_tokens": 5}),
    } | {"greedy": (30, more)}


@pytest.mark.parametrize("seed", range(2))
async def test_every_kind_of_request_resumes_with_equal_output(
    bench: Bench, folder: Path, short_tmp: Path, seed: int
) -> None:
    drawn = random.Random(seed)
    decoder = await bench.real_decoder(folder, short_tmp / "d", max_num_batched_tokens=64)
    _, task = bench.scheduler()
    kinds = await with_stops(bench, folder, KINDS)
    calm = await outcome(bench, kinds, await ask_all(bench, kinds))
    (records, ending), *_ = calm["greedy"][0]
    assert ending.stop and len(decode_tokens(records)) < LENGTH

    rids = await ask_all(bench, kinds)
    whole = sum(len(records) for answers, _ in calm.values() for records, _ in answers)
    for moment in sorted(drawn.uniform(0, 0.9) for _ in range(4)):
        while await logged(bench, rids) < moment * whole:
            await asyncio.sleep(0.001)
        if drawn.random() < 0.5:
            await crash(bench, task)
            _, task = bench.scheduler()
        elif decoder.servicer._session is not None:
            decoder.servicer._session.end(Unavailable("CUT", "the connection was cut"))
    disturbed = await outcome(bench, kinds, rids)
    assert disturbed == calm
    assert await bench.queue.depth() == (0, 0)


async def test_a_takeover_computes_less_than_a_block_of_each_sequence_again(
    bench: Bench, folder: Path, short_tmp: Path
) -> None:
    await bench.real_decoder(folder, short_tmp / "d", max_num_batched_tokens=64)
    _, task = bench.scheduler()
    lengths = [5, 21, 40, 77, 100, 33]
    rids = [await bench.ask(prompt_of(i, n), max_tokens=150) for i, n in enumerate(lengths)]
    while await tokens_logged(bench, rids) < 100 * len(rids):
        await asyncio.sleep(0.001)
    await crash(bench, task)
    there = await tokens_logged(bench, rids)
    address = f"unix:{short_tmp}/s"
    bench.scheduler(listen=address)
    for rid in rids:
        assert len((await bench.answer(rid))[0]) == 150
    async with open_channel(address) as opened:
        load = await SchedulerServiceStub(opened).GetLoad(GetLoadRequest())
    again = load.decoders[0].totals.tokens - (150 * len(rids) - there)
    assert again <= 17 * len(rids)


async def tokens_logged(bench: Bench, rids: list[str]) -> int:
    lengths = [await bench.redis.strlen(bench.keys.log(rid, 0)) for rid in rids]
    return sum(lengths) // 4
