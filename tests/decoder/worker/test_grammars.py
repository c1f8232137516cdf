"""Outputs that follow a grammar, by the whole decoder with the checkpoint's own tokenizer."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from transformers import PreTrainedTokenizerFast

from services.decoder.settings import DecoderSettings
from services.decoder.worker.worker import Worker
from tests.decoder.parallel.test_out_of_memory import Ranks
from tests.decoder.worker.test_late_masks import run
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["circle", "square"]},
    },
    "required": ["size", "kind"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
PROMPTS = [[5, 9, 200, 31], [7, 8, 9, 10, 11], [60, 61]]
BLOCKS = 6
LENGTH = 60
FREE: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 4}]


@pytest.fixture(params=LOADS)
def worker(llama_folder: Path, request: pytest.FixtureRequest) -> Worker:
    chosen = {"model": llama_folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    found: Worker = LOADS[request.param](
        DecoderSettings.model_validate({**chosen, "threads": 1})
    ).worker
    return found


@pytest.fixture(scope="module")
def words(llama_folder: Path) -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(llama_folder)
    return found


def following(words: PreTrainedTokenizerFast, slot: int, **changes: Any) -> Text:
    stops = [words.eos_token_id]
    return Text(
        slot, PROMPTS[slot], greedy(**{"grammar": GRAMMAR, "stop_token_ids": stops, **changes})
    )


def generate(worker: Worker, texts: list[Text], count: int) -> list[list[int]]:
    """The outputs of texts that all go on up to `count` tokens, also behind their ends."""
    slots, order = [text.slot for text in texts], list(range(len(texts)))
    fields: dict[str, Any] = {
        "new": [introduce(text) for text in texts],
        "edit_slot": slots,
        "edit_index": [0] * len(texts),
        "edit_len": [BLOCKS] * len(texts),
        "edit_blocks": [1 + BLOCKS * slot + n for slot in slots for n in range(BLOCKS)],
    }
    starts = [0] * len(texts)
    while len(texts[0].output) < count:
        ends = [len(text.tokens) for text in texts]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        rows = {"row_slot": slots, "row_start": starts, "row_count": counts}
        result = run(worker, make_plan(**fields, **rows, sample_row=order, sample_slot=slots))
        assert not result.failed, result.failed
        for text, token in zip(texts, read_ints(result.tokens), strict=True):
            text.output.append(token)
        fields, starts = {}, ends
    run(worker, make_plan(drop=slots))
    return [text.output for text in texts]


def answer(words: PreTrainedTokenizerFast, output: list[int]) -> Any:
    """What an output says before its end."""
    assert words.eos_token_id in output
    return json.loads(words.decode(output[: output.index(words.eos_token_id)]))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_output_follows_and_those_beside_it_are_as_without_it(
    worker: Worker, words: PreTrainedTokenizerFast, temperature: float
) -> None:
    free = [Text(slot, PROMPTS[slot], greedy(**FREE[slot])) for slot in (0, 1)]
    expected = generate(worker, free, LENGTH)
    beside = [Text(slot, PROMPTS[slot], greedy(**FREE[slot])) for slot in (0, 1)]
    bound = following(words, 2, temperature=temperature, seed=3)
    *found, output = generate(worker, [*beside, bound], LENGTH)
    assert found == expected
    said = answer(words, output)
    assert 1 <= said["size"] <= 99 and said["kind"] in ("circle", "square")


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.2, "seed": 5, "top_p": 0.9}])
def test_an_output_that_goes_on_elsewhere_is_the_same(
    worker: Worker, words: PreTrainedTokenizerFast, changes: dict[str, Any]
) -> None:
    [whole] = generate(worker, [following(words, 0, **changes)], LENGTH)
    end = whole.index(words.eos_token_id)
    assert end > 8
    for cut in range(end + 1):
        text = following(words, 0, **changes)
        text.output = whole[:cut]
        assert generate(worker, [text], end + 1) == [whole[: end + 1]], cut


def test_forks_follow_the_grammar_of_their_parent(
    worker: Worker, words: PreTrainedTokenizerFast
) -> None:
    """As for n choices: they begin with the logits of one row."""
    parent = following(words, 0, temperature=1.5, seed=8)
    count, slots = len(parent.prompt), [0, 1, 2]
    blocks = [1 + BLOCKS * slot + n for slot in slots for n in range(BLOCKS)]
    plan = make_plan(
        new=[introduce(parent)], fork_child=[1, 2], fork_parent=[0, 0], fork_choice=[1, 2],
        edit_slot=slots, edit_index=[0] * 3, edit_len=[BLOCKS] * 3, edit_blocks=blocks,
        copy_src=[1, 1], copy_dst=[blocks[BLOCKS], blocks[2 * BLOCKS]],
        row_slot=[0], row_start=[0], row_count=[count], sample_row=[0] * 3, sample_slot=slots,
    )  # fmt: skip
    outputs = [[token] for token in read_ints(run(worker, plan).tokens)]
    for done in range(LENGTH - 1):
        rows = {"row_slot": slots, "row_start": [count + done] * 3, "row_count": [1] * 3}
        result = run(worker, make_plan(**rows, sample_row=slots, sample_slot=slots))
        for output, token in zip(outputs, read_ints(result.tokens), strict=True):
            output.append(token)
    said = [answer(words, output) for output in outputs]
    assert len({json.dumps(one) for one in said}) > 1


def test_ranks_choose_the_same(llama_folder: Path, words: PreTrainedTokenizerFast) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = Ranks(llama_folder, pool).both(
            lambda worker: generate(worker, [following(words, 0, temperature=1.5, seed=2)], LENGTH)
        )
    assert one == other
    assert answer(words, one[0])
