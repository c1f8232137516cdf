"""What a step that only generates asks of the device, one launched ahead."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.ascend.simulator import counters
from tests.reference_models import wemm
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    introduce,
    make_plan,
    read_ints,
    running_decoder,
)

PROMPTS = [[5, 6, 7, 8, 9, 10], list(range(3, 130)), list(range(200, 260))]
SLOTS = list(range(len(PROMPTS)))
LENGTHS = [len(prompt) for prompt in PROMPTS]
STEPS = 8
BLOCKS = 2  # of each sequence
KINDS: list[list[dict[str, Any]]] = [
    [{}, {}, {}],
    [{}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9}],
    [{}, {"logprobs": 2}, {"temperature": 1.0, "logprobs": 0}],
]
TRANSFERS = ("copy_h2d", "copy_d2h", "synchronize_event")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module", params=["off", "on"])
def graphs(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker(folder: Path, graphs: str) -> Worker:
    return load_worker(folder, graphs)


def load_worker(folder: Path, graphs: str = "off") -> Worker:
    chosen = {"model": folder, "device": "npu", "dtype": "float16", "max_num_seqs": 8}
    cache = {"kv_cache_memory_bytes": 16 << 20, "graphs": graphs}
    return load(DecoderSettings.model_validate({**chosen, **cache})).worker


def launch(worker: Worker, step: int, kinds: list[dict[str, Any]]) -> LaunchedStep:
    """The prompts in the first step, then one token of each."""
    plan = make_plan(
        step=step + 1,
        row_slot=SLOTS,
        row_start=[length + step - 1 for length in LENGTHS] if step else [0] * len(SLOTS),
        row_count=[1] * len(SLOTS) if step else LENGTHS,
        sample_row=SLOTS,
        sample_slot=SLOTS,
    )
    if not step:
        opening = make_plan(
            new=[introduce(Text(s, PROMPTS[s], greedy(seed=s, **kinds[s]))) for s in SLOTS],
            edit_slot=SLOTS,
            edit_index=[0] * len(SLOTS),
            edit_len=[BLOCKS] * len(SLOTS),
            edit_blocks=list(range(1, 1 + BLOCKS * len(SLOTS))),
        )
        plan.MergeFrom(opening)
    return worker.launch(read_plan(plan, worker.limits))


def collect(worker: Worker, step: LaunchedStep) -> list[int]:
    results: list[StepResult] = []
    worker.collect(step, results.append)
    assert not results[0].failed
    return read_ints(results[0].tokens)


@pytest.mark.parametrize("kinds", KINDS)
def test_a_step_takes_one_copy_each_way_and_one_wait(
    worker: Worker, graphs: str, kinds: list[dict[str, Any]]
) -> None:
    worker.reset()
    in_turn = [collect(worker, launch(worker, step, kinds)) for step in range(STEPS)]
    worker.reset()
    ahead, costs = [], []
    launched = [launch(worker, 0, kinds)]
    for step in range(1, STEPS):
        with counters.counted() as cost:
            launched.append(launch(worker, step, kinds))
            ahead.append(collect(worker, launched.pop(0)))
        costs.append(Counter(cost))
    ahead.append(collect(worker, launched.pop()))
    assert ahead == in_turn
    for cost in costs[1:]:
        assert {name: cost[name] for name in TRANSFERS} == dict.fromkeys(TRANSFERS, 1)
        assert counters.synchronisations(cost) == 1  # the wait for the result
        assert cost["replay"] == (graphs == "on")


def test_one_sequence_with_a_penalty_leaves_the_others_on_the_device(worker: Worker) -> None:
    """It alone is waited for, its logits alone come to the host, and all tokens are those without the others."""
    penalty = {"presence_penalty": 1.5}
    drawn = {"temperature": 0.8, "top_k": 20}
    alone = []
    for slot, kind in enumerate([{}, penalty, drawn]):
        worker.reset()
        kinds: list[dict[str, Any]] = [{}, {}, {}]
        kinds[slot] = kind
        steps = [collect(worker, launch(worker, step, kinds)) for step in range(STEPS)]
        alone.append([tokens[slot] for tokens in steps])
    worker.reset()
    together = []
    for step in range(STEPS):
        launched = launch(worker, step, [{}, penalty, drawn])
        assert launched.split.on_device.tolist() == [True, False, True]
        assert launched.split.whole_rows.tolist() == [1]
        with counters.counted() as cost:
            together.append(collect(worker, launched))
        assert counters.synchronisations(cost) == 1
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone


def test_heads_of_another_size_take_no_more_kernels(tmp_path: Path) -> None:
    """They are filled up with zeros when the model is loaded."""
    costs = []
    for size in (64, 80):
        text = {"head_dim": size, "num_attention_heads": 4, "num_key_value_heads": 2}
        own = load_worker(make_checkpoint(tmp_path / str(size), "llama", text=text))
        collect(own, launch(own, 0, KINDS[0]))
        before = Counter(counters.kernels)
        collect(own, launch(own, 1, KINDS[0]))
        costs.append(Counter(counters.kernels) - before)
    assert costs[0] == costs[1]


async def test_partial_lora_of_a_prompt_with_a_picture_is_not_waited_for(
    tmp_path: Path, short_tmp: Path
) -> None:
    folder = wemm.write_checkpoint(tmp_path / "wemm")
    rows = np.ones((20, Checkpoint(folder).text_config["hidden_size"]), np.float32)
    digest = b"picture".ljust(16, b"-")
    item = MediaItem(
        digest=digest, modality=Modality.MODALITY_IMAGE, offset=3, length=len(rows), rows=len(rows)
    )
    prompt = [7] * 40
    limits = {"device": "npu", "dtype": "float16", "max_model_len": 512}
    async with (
        running_decoder(folder, short_tmp / "s", **limits) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        store = ArtifactStore(short_tmp / "artifacts", "producer", "")
        await stream.run(make_plan(fetch=[store.put(digest, rows, "float32")]))
        while not stream.ready:
            await stream.next_message()
        texts = [Text(0, prompt, greedy(), media=[item]), Text(1, prompt[3:], greedy())]
        with counters.counted() as cost:
            result = await NaiveScheduler(stream).step(texts, 64)
    assert not result.failed
    assert counters.synchronisations(cost) == 1, cost  # the wait for the result
