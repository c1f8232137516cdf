"""Plans of one sequence, for tests that choose its blocks themselves."""

from typing import Any

from tests.support.decoder.step_stream import (
    StepStream,
    Text,
    greedy,
    introduce,
    make_plan,
    read_ints,
)


def new_text(prompt: list[int], slot: int, blocks: list[int], **changes: Any) -> dict[str, Any]:
    """Fields of a plan that introduces the prompt with these blocks."""
    text = Text(slot, prompt, greedy(**changes))
    return {
        "new": [introduce(text)],
        "edit_slot": [slot],
        "edit_index": [0],
        "edit_len": [len(blocks)],
        "edit_blocks": blocks,
    }


async def go_on(stream: StepStream, slot: int, computed: int, count: int) -> list[int]:
    """`count` further tokens of one sequence, one a step."""
    tokens = []
    for start in range(computed, computed + count):
        result = await stream.run(
            make_plan(row_slot=[slot], row_start=[start], row_count=[1], sample_row=[0],
                      sample_slot=[slot])
        )  # fmt: skip
        assert not result.failed, result.failed
        tokens += read_ints(result.tokens)
    return tokens


def whole_prompt(prompt: list[int], slot: int) -> dict[str, list[int]]:
    """Fields of a plan that computes a prompt in one row and samples."""
    return {
        "row_slot": [slot],
        "row_start": [0],
        "row_count": [len(prompt)],
        "sample_row": [0],
        "sample_slot": [slot],
    }
