"""Forks, copies, swaps, shared blocks, chunks: what a plan may do with sequences and blocks."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import load_reference
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.decoder.plans import go_on, new_text, whole_prompt
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    empty_plan,
    greedy,
    make_plan,
    read_floats,
    read_ints,
    running_decoder,
)


@pytest.fixture(scope="module", params=[(16, "cpu"), (128, "cpu"), (16, "deferred")])
def variant(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Tokens in a block, and on which device."""
    size, device = request.param
    return int(size), str(device)


@pytest.fixture(scope="module")
def size(variant: tuple[int, str]) -> int:
    return variant[0]


@pytest.fixture(scope="module")
def prompt(size: int) -> list[int]:
    """Two full blocks and a partly filled one."""
    numbers = np.random.default_rng(3).integers(0, 400, 2 * size + 5)
    return [int(number) for number in numbers]


@pytest.fixture
async def stream(
    llama_folder: Path, short_tmp: Path, variant: tuple[int, str]
) -> AsyncIterator[StepStream]:
    size, device = variant
    options = {"num_host_blocks": 8, "block_size": size, "load": LOADS[device]}
    async with (
        running_decoder(llama_folder, short_tmp / "s", **options) as decoder,
        StepStream.open(decoder.address) as opened,
    ):
        assert opened.hello.block_size == size
        yield opened


@pytest.fixture(scope="module")
def expected(llama_folder: Path, prompt: list[int]) -> list[int]:
    """Twelve tokens after the prompt, by transformers."""
    return greedy_tokens(load_reference(llama_folder), prompt, 12)[0]


def lists(**changes: list[int]) -> dict[str, list[int]]:
    return {**empty_plan(), **changes}


async def test_a_prefix_is_shared_inside_the_plan_that_computes_it(
    stream: StepStream, expected: list[int], prompt: list[int], size: int
) -> None:
    """The second sequence starts behind two blocks that the first computes in the same step."""
    first, second = new_text(prompt, 0, [1, 2, 3, 4]), new_text(prompt, 1, [1, 2, 5, 6])
    result = await stream.run(
        make_plan(
            new=first["new"] + second["new"],
            edit_slot=[0, 1],
            edit_index=[0, 0],
            edit_len=[4, 4],
            edit_blocks=first["edit_blocks"] + second["edit_blocks"],
            row_slot=[1, 0],
            row_start=[2 * size, 0],
            row_count=[5, len(prompt)],
            sample_row=[0, 1],
            sample_slot=[1, 0],
        )
    )
    assert not result.failed
    assert read_ints(result.tokens) == [expected[0]] * 2
    assert await go_on(stream, 0, len(prompt), 5) == expected[1:6]
    assert await go_on(stream, 1, len(prompt), 5) == expected[1:6]


async def test_two_steps_may_be_in_flight(
    stream: StepStream, expected: list[int], prompt: list[int]
) -> None:
    """The token that the second step runs is sampled by the first."""
    await stream.send(make_plan(**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0)))
    for start in range(len(prompt), len(prompt) + 5):
        await stream.send(
            make_plan(row_slot=[0], row_start=[start], row_count=[1], sample_row=[0],
                      sample_slot=[0])
        )  # fmt: skip
        assert read_ints((await stream.result()).tokens) == [expected[start - len(prompt)]]
    assert read_ints((await stream.result()).tokens) == [expected[5]]


async def test_forks_share_the_prompt_and_part_by_copy(
    stream: StepStream, expected: list[int], prompt: list[int]
) -> None:
    """n = 2: one prefill, two samples of one row, then the partly filled block is copied."""
    plan = {**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0)}
    plan.update(fork_child=[5], fork_parent=[0], fork_choice=[1])
    plan.update(sample_row=[0, 0], sample_slot=[0, 5])
    # The fork comes before the table edits of its plan: the child gets its table by edits too.
    plan.update(edit_slot=[0, 5], edit_index=[0, 0], edit_len=[4, 4],
                edit_blocks=[1, 2, 3, 4, 1, 2, 3, 7])  # fmt: skip
    result = await stream.run(make_plan(**plan))
    assert not result.failed
    assert read_ints(result.tokens) == [expected[0]] * 2
    result = await stream.run(
        make_plan(
            edit_slot=[5], edit_index=[2], edit_len=[2], edit_blocks=[6, 7],
            copy_src=[3], copy_dst=[6],
            row_slot=[0, 5], row_start=[len(prompt)] * 2, row_count=[1, 1],
            sample_row=[0, 1], sample_slot=[0, 5],
        )
    )  # fmt: skip
    assert read_ints(result.tokens) == [expected[1]] * 2
    assert await go_on(stream, 5, len(prompt) + 1, 3) == expected[2:5]
    assert await go_on(stream, 0, len(prompt) + 1, 3) == expected[2:5]


async def test_a_chosen_token_takes_the_place_of_the_sampled_one(
    stream: StepStream, llama_folder: Path, expected: list[int], prompt: list[int]
) -> None:
    """Beam search: the parent goes on with another token than it sampled, a fork with a third."""
    sampled = await stream.run(
        make_plan(**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0))
    )
    assert read_ints(sampled.tokens) == expected[:1]
    plan = lists(
        fork_child=[5],
        fork_parent=[0],
        fork_choice=[1],
        set_token_slot=[0, 5],
        set_token=[17, 23],
        copy_src=[3],
        copy_dst=[6],
        edit_slot=[5],
        edit_index=[2],
        edit_len=[2],
        edit_blocks=[6, 7],
        row_slot=[0, 5],
        row_start=[len(prompt)] * 2,
        row_count=[1, 1],
        sample_row=[0, 1],
        sample_slot=[0, 5],
    )
    result = await stream.run(make_plan(**plan))
    model = load_reference(llama_folder)
    assert read_ints(result.tokens) == [
        greedy_tokens(model, [*prompt, token], 1)[0][0] for token in (17, 23)
    ]


async def test_choices_draw_their_own_numbers(stream: StepStream, prompt: list[int]) -> None:
    plan = {**new_text(prompt, 0, [1, 2, 3, 4], temperature=2.0, seed=5), **whole_prompt(prompt, 0)}
    children = list(range(1, 8))
    plan.update(fork_child=children, fork_parent=[0] * 7, fork_choice=children)
    plan.update(sample_row=[0] * 8, sample_slot=[0, *children])
    assert len(set(read_ints((await stream.run(make_plan(**plan))).tokens))) > 3


async def test_swapped_blocks_come_back(
    stream: StepStream, expected: list[int], prompt: list[int]
) -> None:
    await stream.run(make_plan(**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0)))
    await stream.run(
        make_plan(edit_slot=[0], edit_index=[0], edit_len=[0], edit_blocks=[],
                  swap_out_device=[1, 2, 3], swap_out_host=[7, 0, 3])
    )  # fmt: skip
    # Another sequence takes the blocks meanwhile.
    other = await stream.run(
        make_plan(**new_text(prompt, 1, [1, 2, 3, 4]), **whole_prompt(prompt, 1))
    )
    assert read_ints(other.tokens) == expected[:1]
    await stream.run(
        make_plan(edit_slot=[0], edit_index=[0], edit_len=[4], edit_blocks=[11, 12, 13, 14],
                  swap_in_host=[7, 0, 3], swap_in_device=[11, 12, 13])
    )  # fmt: skip
    assert await go_on(stream, 0, len(prompt), 4) == expected[1:5]


async def test_copies_happen_in_their_order(
    stream: StepStream, expected: list[int], prompt: list[int]
) -> None:
    await stream.run(make_plan(**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0)))
    await stream.run(
        make_plan(copy_src=[1, 2, 3, 9], copy_dst=[7, 8, 9, 10], edit_slot=[0], edit_index=[0],
                  edit_len=[4], edit_blocks=[7, 8, 10, 4])
    )  # fmt: skip
    assert await go_on(stream, 0, len(prompt), 4) == expected[1:5]


async def test_preempted_sequences_keep_their_history(
    stream: StepStream, expected: list[int], prompt: list[int]
) -> None:
    """Blocks are taken away and given anew: the tokens so far are run again, in chunks."""
    await stream.run(make_plan(**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0)))
    assert await go_on(stream, 0, len(prompt), 2) == expected[1:3]
    await stream.run(make_plan(edit_slot=[0], edit_index=[0], edit_len=[0], edit_blocks=[]))
    await stream.run(
        make_plan(edit_slot=[0], edit_index=[0], edit_len=[4], edit_blocks=[9, 8, 7, 6],
                  row_slot=[0], row_start=[0], row_count=[20])
    )  # fmt: skip
    result = await stream.run(
        make_plan(
            row_slot=[0],
            row_start=[20],
            row_count=[len(prompt) - 17],
            sample_row=[0],
            sample_slot=[0],
        )
    )
    assert read_ints(result.tokens) == [expected[3]]


async def test_freed_blocks_may_be_given_out_in_the_next_plan(
    stream: StepStream, expected: list[int], prompt: list[int]
) -> None:
    """Plans run strictly in order: a discarded step does not disturb the next owner."""
    await stream.run(make_plan(**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0)))
    await stream.send(
        make_plan(
            row_slot=[0], row_start=[len(prompt)], row_count=[1], sample_row=[0], sample_slot=[0]
        )
    )
    await stream.send(
        make_plan(drop=[0], **new_text(prompt, 3, [3, 4, 1, 2]), **whole_prompt(prompt, 3))
    )
    await stream.result()
    assert read_ints((await stream.result()).tokens) == expected[:1]
    assert await go_on(stream, 3, len(prompt), 4) == expected[1:5]


async def test_a_resumed_sequence_goes_on_from_its_log(
    stream: StepStream, expected: list[int], prompt: list[int]
) -> None:
    """Introduced again with what it has generated so far."""
    text = Text(0, prompt, greedy(), output=expected[:5])
    await NaiveScheduler(stream).generate([text], 9, chunk=10)
    assert text.output == expected[:9]


async def test_every_bit_is_the_same_in_any_company(
    llama_folder: Path, short_tmp: Path, stream: StepStream, prompt: list[int]
) -> None:
    """Log-probabilities alone, in a crowd, and after a resume in chunks are equal in every bit."""

    async def run(texts: list[Text], count: int, chunk: int) -> dict[int, list[float]]:
        scheduler = NaiveScheduler(stream)
        seen: dict[int, list[float]] = {text.slot: [] for text in texts}
        while left := [text for text in texts if len(text.output) < count]:
            before = {text.slot: len(text.output) for text in left}
            result = await scheduler.step(left, chunk)
            sampled = [text for text in left if len(text.output) > before[text.slot]]
            for text, value in zip(sampled, read_floats(result.logprobs), strict=True):
                seen[text.slot].append(value)
        await stream.run(make_plan(drop=[text.slot for text in texts]))
        return seen

    settings = {"temperature": 1.0, "seed": 11, "logprobs": 0}
    numbers = np.random.default_rng(0)
    alone = Text(0, prompt, greedy(**settings))
    values = (await run([alone], 30, 64))[0]
    crowd = [
        Text(slot, numbers.integers(0, 400, size).tolist(), greedy(**settings))
        for slot, size in enumerate((3, 90, 20, 55, 31, 8, 1, 44, 70), 1)
    ]
    again = Text(0, prompt, greedy(**settings))
    assert (await run([*crowd[:4], again, *crowd[4:]], 30, 9))[0] == values
    assert again.output == alone.output
    resumed = Text(0, prompt, greedy(**settings), output=alone.output[:17])
    assert (await run([resumed, *[Text(t.slot, t.prompt, t.sampling) for t in crowd]], 30, 5))[
        0
    ] == values[17:]
    assert resumed.output == alone.output


async def test_log_probabilities_are_those_of_transformers(
    stream: StepStream, llama_folder: Path, prompt: list[int]
) -> None:
    expected, logits = greedy_tokens(load_reference(llama_folder), prompt, 3)
    result = await stream.run(
        make_plan(**new_text(prompt, 0, [1, 2, 3, 4], logprobs=4), **whole_prompt(prompt, 0))
    )
    reference = logits[0].log_softmax(-1)
    best = reference.topk(4)
    assert read_floats(result.logprobs) == pytest.approx([float(best.values[0])], abs=1e-4)
    assert read_ints(result.top_ids) == best.indices.tolist()
    assert read_floats(result.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)
    assert_same_up_to_ties(read_ints(result.tokens), expected[:1], logits)


@pytest.mark.parametrize("chunk", [64, 11])
async def test_prompt_log_probabilities(
    stream: StepStream, llama_folder: Path, chunk: int, prompt: list[int]
) -> None:
    import torch

    with torch.no_grad():
        logits = load_reference(llama_folder)(input_ids=torch.tensor([prompt])).logits[0]
    reference = logits.log_softmax(-1)[:-1]
    text = Text(0, prompt, greedy(prompt_logprobs=2))
    scheduler, own, ids = NaiveScheduler(stream), [], []
    while not text.output:
        for part in (await scheduler.step([text], chunk)).prompt_logprobs:
            own += read_floats(part.logprobs)
            ids += read_ints(part.top_ids)
    expected = reference[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    assert own == pytest.approx(expected.tolist(), abs=1e-4)
    assert ids == reference.topk(2).indices.flatten().tolist()
    assert not (await scheduler.step([text], chunk)).prompt_logprobs
