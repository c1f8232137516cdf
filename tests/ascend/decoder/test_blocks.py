"""On an NPU: forks, copies, swaps, shared blocks and chunks, as `tests/decoder/worker/test_blocks.py` has them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import ServingError
from tests.ascend.simulator import faults
from tests.decoder.worker import test_blocks as on_cpu
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.plans import new_text, whole_prompt
from tests.support.decoder.step_stream import StepStream, make_plan, running_decoder

test_a_shared_prefix = on_cpu.test_a_prefix_is_shared_inside_the_plan_that_computes_it
test_two_steps_in_flight = on_cpu.test_two_steps_may_be_in_flight
test_forks = on_cpu.test_forks_share_the_prompt_and_part_by_copy
test_a_chosen_token = on_cpu.test_a_chosen_token_takes_the_place_of_the_sampled_one
test_choices = on_cpu.test_choices_draw_their_own_numbers
test_swapped_blocks = on_cpu.test_swapped_blocks_come_back
test_ordered_copies = on_cpu.test_copies_happen_in_their_order
test_preemption = on_cpu.test_preempted_sequences_keep_their_history
test_freed_blocks = on_cpu.test_freed_blocks_may_be_given_out_in_the_next_plan
test_a_resumed_sequence = on_cpu.test_a_resumed_sequence_goes_on_from_its_log
prompt = on_cpu.prompt
expected = on_cpu.expected


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped queries."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def size() -> int:
    """Tokens in a block."""
    return 128


@pytest.fixture
async def stream(llama_folder: Path, short_tmp: Path) -> AsyncIterator[StepStream]:
    options = {"num_host_blocks": 8, "device": "npu", "dtype": "float16"}
    async with (
        running_decoder(llama_folder, short_tmp / "s", **options) as decoder,
        StepStream.open(decoder.address) as opened,
    ):
        yield opened


async def test_a_step_that_fails_on_the_device_says_what_helps(
    stream: StepStream, prompt: list[int]
) -> None:
    faults.plant(kernel_in=1, kernel_error=faults.KERNEL_RUNS_OUT_OF_MEMORY)
    with pytest.raises(ServingError, match="lower --gpu-memory-utilization") as raised:
        await stream.run(make_plan(**new_text(prompt, 0, [1, 2, 3]), **whole_prompt(prompt, 0)))
    assert raised.value.reason == "NPU_OUT_OF_MEMORY"
