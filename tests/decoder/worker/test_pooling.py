"""Prompts that become vectors: whatever a prompt is divided into, and beside whatever, its bits are the same."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Model

from shared.errors import InvalidRequest
from tessera.common.v1.pooling_pb2 import PooledRows, PoolingHead, PoolingParams
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.support.checkpoints.options import CheckpointOptions, text_config, tokenizer
from tests.support.decoder.plans import go_on, new_text, whole_prompt
from tests.support.decoder.step_stream import StepStream, make_plan, running_decoder

WIDTH = 64
PROMPT = [5 + 7 * i % 300 for i in range(70)]
LAST, MEAN = PooledRows.POOLED_ROWS_LAST, PooledRows.POOLED_ROWS_MEAN
ITSELF = PoolingHead.POOLING_HEAD_NONE


@pytest.fixture
async def stream(llama_folder: Path, short_tmp: Path) -> AsyncIterator[StepStream]:
    async with (
        running_decoder(llama_folder, short_tmp / "d", block_size=16) as decoder,
        StepStream.open(decoder.address) as opened,
    ):
        yield opened


def asked(rows: PooledRows.ValueType = LAST, **changes: Any) -> PoolingParams:
    return PoolingParams(**{"rows": rows, "head": ITSELF, "width": WIDTH, **changes})


async def vector(
    stream: StepStream, params: PoolingParams, cuts: list[int], slot: int = 0
) -> StepResult:
    """The last result of a prompt in rows that end at `cuts`, and at its end."""
    first = 1 + 5 * slot
    plan = new_text(PROMPT, slot, list(range(first, first + 5)))
    plan["new"][0].pooling.CopyFrom(params)
    start = 0
    for end in [*cuts, len(PROMPT)]:
        rows = {"row_slot": [slot], "row_start": [start], "row_count": [end - start]}
        pools = {"pool_row": [0], "pool_slot": [slot]} if end == len(PROMPT) else {}
        result = await stream.run(make_plan(**plan, **rows, **pools))
        assert end == len(PROMPT) or not result.pooled
        plan, start = {}, end
    await stream.run(make_plan(drop=[slot]))
    return result


@pytest.mark.parametrize("rows", [LAST, MEAN])
async def test_any_division_gives_the_same_bits(
    stream: StepStream, rows: PooledRows.ValueType
) -> None:
    [whole] = (await vector(stream, asked(rows), [])).pooled
    assert len(whole) == 4 * WIDTH
    for cuts in ([1], [16, 32, 64], [69], [3, 40, 41]):
        assert (await vector(stream, asked(rows), cuts)).pooled == [whole]


async def test_a_vector_beside_a_sequence_that_generates(stream: StepStream) -> None:
    [alone] = (await vector(stream, asked(), [])).pooled
    text = PROMPT[:20]
    plan = new_text(text, 3, [30, 31])
    await stream.run(make_plan(**plan, **whole_prompt(text, 3)))
    expected = await go_on(stream, 3, 20, 2)
    await stream.run(make_plan(drop=[3], **new_text(text, 4, [32, 33]), **whole_prompt(text, 4)))
    plan = new_text(PROMPT, 0, [1, 2, 3, 4, 5])
    plan["new"][0].pooling.CopyFrom(asked())
    rows = {"row_slot": [4, 0], "row_start": [20, 0], "row_count": [1, len(PROMPT)]}
    both = {"sample_row": [0], "sample_slot": [4], "pool_row": [1], "pool_slot": [0]}
    result = await stream.run(make_plan(**plan, **rows, **both))
    assert result.pooled == [alone]
    again = await go_on(stream, 4, 21, 1)
    assert [int.from_bytes(result.tokens, "little"), *again] == expected


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (asked(width=63), "OTHER_WIDTH"),
        (asked(head=PoolingHead.POOLING_HEAD_SCORE), "NO_SUCH_HEAD"),
        (asked(head=PoolingHead.POOLING_HEAD_TOKENS, token_ids=[1, 99_999]), "INVALID_TOKEN"),
        (asked(MEAN, head=PoolingHead.POOLING_HEAD_TOKENS, token_ids=[1]), "NO_SUCH_HEAD"),
    ],
)
async def test_what_the_model_does_not_give_fails_one_row(
    stream: StepStream, params: PoolingParams, reason: str
) -> None:
    result = await vector(stream, params, [])
    [failed] = result.failed
    assert failed.failure.reason == reason
    assert len((await vector(stream, asked(), [])).pooled[0]) == 4 * WIDTH


async def test_a_mean_with_a_gap_fails(stream: StepStream) -> None:
    plan = new_text(PROMPT, 0, [1, 2, 3, 4, 5])
    plan["new"][0].pooling.CopyFrom(asked(MEAN))
    rows = {"row_slot": [0], "row_start": [16], "row_count": [len(PROMPT) - 16]}
    result = await stream.run(make_plan(**plan, **rows, pool_row=[0], pool_slot=[0]))
    assert [one.failure.reason for one in result.failed] == ["POOLING_GAP"]
    assert result.pooled == [b""]


@pytest.mark.parametrize(
    "pools",
    [
        {"pool_row": [1], "pool_slot": [0]},
        {"pool_row": [0], "pool_slot": [1]},
        {"pool_row": [0, 0], "pool_slot": [0, 0]},
        {"pool_row": [0], "pool_slot": [0], "sample_row": [0], "sample_slot": [0]},
        {"pool_row": [0], "pool_slot": []},
    ],
)
async def test_pools_that_make_no_sense_end_the_stream(
    stream: StepStream, pools: dict[str, list[int]]
) -> None:
    plan = new_text(PROMPT, 0, [1, 2, 3, 4, 5])
    rows = {"row_slot": [0], "row_start": [0], "row_count": [len(PROMPT)]}
    with pytest.raises(InvalidRequest, match="pool"):
        await stream.run(make_plan(**plan, **rows, **pools))


async def test_layers_without_an_output_matrix_give_vectors_and_generate_nothing(
    tmp_path: Path, short_tmp: Path
) -> None:
    words = tokenizer()
    bare = Qwen3Model(text_config("qwen3", CheckpointOptions(), words))
    bare.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    async with (
        running_decoder(tmp_path, short_tmp / "d", block_size=16) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        with torch.inference_mode():
            rows = bare.eval()(input_ids=torch.tensor([PROMPT])).last_hidden_state[0]
        [found] = (await vector(stream, asked(), [16])).pooled
        np.testing.assert_allclose(np.frombuffer(found, "<f4"), rows[-1].numpy(), atol=1e-5)
        plan = new_text(PROMPT, 0, [1, 2, 3, 4, 5])
        result = await stream.run(make_plan(**plan, **whole_prompt(PROMPT, 0)))
        assert [one.failure.reason for one in result.failed] == ["NO_OUTPUT_MATRIX"]
