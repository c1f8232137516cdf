"""Steps that only generate, replayed from graphs: tokens are those of steps without."""

import gc
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch_npu import npu

from services.decoder.devices.npu import device as npu_device
from services.decoder.devices.npu.forms import Forms
from services.decoder.loading import graphs as loading
from services.decoder.loading.graphs import find_graphs, graph_bytes
from services.decoder.loading.load import Loaded, load
from services.decoder.settings import DecoderSettings
from services.decoder.steps.step import Step
from shared.errors import InvalidRequest
from tests.ascend.simulator import counters, faults
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

LENGTHS = (5, 126, 40, 7, 250, 60)  # of prompts: two reach a further block within the answer
ROWS = [1, 2, 4, 8, 12]


def load_decoder(folder: Path, **changes: Any) -> Loaded:
    chosen = {"model": folder, "device": "npu", "dtype": "float16", "max_num_seqs": ROWS[-1]}
    cache = {"kv_cache_memory_bytes": 16 << 20}
    return load(DecoderSettings.model_validate({**chosen, **cache, **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = {"max_position_embeddings": 512}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", text=text)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_decoder(folder, graphs="on")


Answers = list[list[int]]
Generate = Callable[..., Any]


@pytest.fixture
def generate(
    loaded: Loaded, folder: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> Generate:
    """Answers to prompts that come and go, one of them preempted in between, and the sizes of the graphs that ran."""

    async def run(graphs: Any) -> tuple[Answers, list[int]]:
        monkeypatch.setattr(loaded.worker, "graphs", graphs)
        sizes: list[int] = []
        if graphs is not None:
            replay = graphs.run

            def spy(step: Step) -> Tensor:
                sizes.append(len(step.ids))
                found: Tensor = replay(step)
                return found

            monkeypatch.setattr(graphs, "run", spy)
        texts = [
            Text(slot, [(7 * slot + place) % 400 for place in range(length)], greedy())
            for slot, length in enumerate(LENGTHS)
        ]
        async with (
            running_decoder(folder, short_tmp / "s", load=lambda _: loaded) as decoder,
            StepStream.open(decoder.address, lease=1) as stream,
        ):
            scheduler = NaiveScheduler(stream)
            await scheduler.generate(texts[:3], 6)
            await scheduler.generate(texts, 10, chunk=256)
            texts[1].blocks, texts[1].computed = [], 0
            await scheduler.generate(texts[1:3], 14)
            await scheduler.generate(texts[:1], 18)
        monkeypatch.undo()
        return [text.output for text in texts], sizes

    return run


async def test_tokens_are_those_without_graphs(loaded: Loaded, generate: Generate) -> None:
    expected, _ = await generate(None)
    answers, sizes = await generate(loaded.worker.graphs)
    assert answers == expected
    assert set(sizes) == {1, 2, 4, 8}


async def test_rows_that_fill_a_graph_up_touch_nothing_that_others_read(
    loaded: Loaded, generate: Generate
) -> None:
    expected, _ = await generate(None)
    cache = [part for layer in loaded.worker._kv for part in (layer.k, layer.v)]
    with torch.inference_mode():
        for part in cache:
            part.fill_(float("nan"))
    answers, _ = await generate(loaded.worker.graphs)
    assert answers == expected
    for part in cache:
        filled = part.cpu().isfinite().flatten(2).all(-1)  # [blocks, places]
        most = 8 - len(LENGTHS)
        assert filled[0, :most].all() and not filled[0, most:].any()
        used = int(filled[1:].any(1).sum())
        assert (
            used == 1 + 2 + 1 + 1 + 3 + 1 + 2
        )  # of the prompts with their answers, and the one begun anew
    with torch.inference_mode():
        for part in cache:
            part.zero_()


def fail_capture(monkeypatch: pytest.MonkeyPatch) -> str:
    end = npu.NPUGraph.capture_end

    def fails(graph: Any) -> None:
        end(graph)
        raise RuntimeError("aclmdlRICaptureEnd, error code is 207008: EL0009")

    monkeypatch.setattr(npu.NPUGraph, "capture_end", fails)
    return "too many graphs or streams"


def lack_kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Forms, "form", lambda self, heads: None)
    return "attention without a fused kernel"


def update_otherwise(monkeypatch: pytest.MonkeyPatch, lengths: Callable[[int], int]) -> None:
    """Makes graphs take other lengths than they are told."""
    update = npu.NPUGraph.update

    def other(graph: Any, given: list[dict[str, list[int]]]) -> None:
        update(graph, [{name: [lengths(n) for n in told] for name, told in given[0].items()}])

    monkeypatch.setattr(npu.NPUGraph, "update", other)


def keep_lengths(monkeypatch: pytest.MonkeyPatch) -> str:
    update_otherwise(monkeypatch, lambda length: 1)
    return "a step of 1 row gives something else"


def see_the_first_block_alone(monkeypatch: pytest.MonkeyPatch) -> str:
    update_otherwise(monkeypatch, lambda length: min(length, 128))
    return "a step of 1 row gives something else"


def see_all_but_the_last_block(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of sequences of four blocks, that is: all shorter ones are seen whole."""
    update_otherwise(monkeypatch, lambda length: min(length, 3 * 128))
    return "a step of 1 row gives something else"


@pytest.mark.parametrize(
    "plant",
    [
        fail_capture,
        lack_kernel,
        keep_lengths,
        see_the_first_block_alone,
        see_all_but_the_last_block,
    ],
)
async def test_where_graphs_fail_steps_run_without(
    loaded: Loaded, generate: Generate, plant: Callable[[pytest.MonkeyPatch], str]
) -> None:
    expected, _ = await generate(None)
    with pytest.MonkeyPatch.context() as patched, capture_logs() as logs:
        reason, stream = plant(patched), npu.current_stream()
        graphs = find_graphs("on", loaded.worker._model, loaded.device, loaded.worker)
        assert npu.current_stream() == stream
    assert graphs is None
    assert [line["log_level"] for line in logs if "graphs" in line["event"]] == ["warning"]
    assert reason in logs[-1]["reason"]
    assert (await generate(None))[0] == expected


def test_a_graph_of_a_single_row_that_keeps_its_lengths_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_lengths(monkeypatch)
    assert load_decoder(folder, graphs="on", max_num_seqs=1).worker.graphs is None
    monkeypatch.undo()
    loaded = load_decoder(folder, graphs="on", max_num_seqs=1)
    assert loaded.worker.graphs is not None
    with torch.inference_mode():
        for layer in loaded.worker.caches:  # what is here from the first steps
            layer.k.zero_()
            layer.v.zero_()
    assert find_graphs("on", loaded.worker._model, loaded.device, loaded.worker) is not None
    for layer in loaded.worker.caches:  # what the trials have written is gone
        assert not layer.k[1:].any() and not layer.v[1:].any()


def test_the_faster_way_is_taken_and_both_are_logged(loaded: Loaded) -> None:
    with capture_logs() as logs:
        graphs = find_graphs("auto", loaded.worker._model, loaded.device, loaded.worker)
    steps = [line for line in logs if line["event"] == "timed steps"]
    assert [line["rows"] for line in steps] == [1, 4, 12]
    called, replayed = (sum(line[name] for line in steps) for name in ("ms_called", "ms_replayed"))
    assert (graphs is not None) == (replayed < called)
    captured = [line["rows"] for line in logs if line["event"] == "graphs captured"]
    assert captured == ([ROWS] if graphs is not None else [])


@pytest.mark.parametrize("is_faster", [True, False])
def test_unless_told_otherwise_graphs_are_used_where_they_are_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    times = cycle([2.0, 1.0] if is_faster else [1.0, 2.0])  # called, replayed
    monkeypatch.setattr(loading, "_milliseconds", lambda *_: next(times))
    with capture_logs() as logs:
        worker = load_decoder(folder).worker
    assert (worker.graphs is not None) == is_faster
    said = [line["event"] for line in logs if "graphs" in line["event"]]
    assert said == ["graphs captured" if is_faster else "no graphs: they are slower here"]


class Killed(BaseException):
    """Ends a process."""


def test_what_ended_a_start_is_not_tried_by_the_next_one(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "_is_faster", lambda *_: True)
    worker, device = loaded.worker, loaded.device
    find = partial(find_graphs, model=worker._model, device=device, worker=worker)
    begin = npu.NPUGraph.capture_begin

    def end(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(npu.NPUGraph, "capture_begin", end)
    monkeypatch.setattr(npu.NPUGraph, "capture_end", lambda _: None)
    with pytest.raises(Killed):
        find("auto")
    monkeypatch.setattr(npu.NPUGraph, "capture_begin", begin)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "_is_faster", lambda *_: True)
    with capture_logs() as logs:
        assert find("auto") is None
    assert "--graphs on tries them again" in logs[-1]["reason"]
    assert find("on") is not None
    assert find("auto") is not None
    with device.surviving("something that runs now"):
        assert not device.ended_within("something that runs now")


def test_a_device_that_computes_no_more_behind_graphs_ends_the_start(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every start would fail in the same way."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = loaded.device
    with pytest.raises(RuntimeError, match="507015"), device.surviving("graphs"):
        faults.plant(faulted=1)
    faults.clear()
    assert device.ended_within("graphs")


def test_the_memory_of_graphs_is_counted(loaded: Loaded) -> None:
    worker, device = loaded.worker, loaded.device
    limits = worker.limits
    counted = graph_bytes("on", worker._model, device, limits.max_slots, limits.max_model_len)
    # Of as many rows as there are unless told otherwise, which are more than a block has places.
    assert counted < graph_bytes("on", worker._model, device, 256, limits.max_model_len)
    gc.collect()  # decoders of the tests before would be given back meanwhile
    before = npu.memory_allocated()
    graphs = find_graphs("on", worker._model, device, worker)
    assert graphs is not None
    assert 0 < npu.memory_allocated() - before <= counted


async def test_layers_with_windows_are_replayed_too(tmp_path: Path, short_tmp: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")  # with a window of 20 tokens
    found = []
    for graphs in ("off", "on"):
        texts = [Text(slot, list(range(9 * slot + 5)), greedy()) for slot in range(4)]
        decoder = load_decoder(folder, graphs=graphs)
        assert (decoder.worker.graphs is not None) == (graphs == "on")
        async with (
            running_decoder(folder, short_tmp / graphs, load=lambda _, it=decoder: it) as served,
            StepStream.open(served.address) as stream,
        ):
            await NaiveScheduler(stream).generate(texts, 24)
        found.append([text.output for text in texts])
    assert found[0] == found[1]


def test_a_310p_has_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_device, "is_310p", lambda: True)
    with pytest.raises(InvalidRequest, match="--graphs on: this device"):
        load_decoder(folder, graphs="on")


@pytest.mark.parametrize(("graphs", "level"), [("on", "warning"), ("auto", "info")])
def test_the_code_of_transformers_runs_without(folder: Path, graphs: str, level: str) -> None:
    with capture_logs() as logs:
        loaded = load_decoder(folder, graphs=graphs, model_backend="transformers")
    assert loaded.worker.graphs is None
    [said] = [line for line in logs if line["event"] == "no graphs"]
    assert "transformers" in said["reason"] and said["log_level"] == level
    counters.on_ai_cpu.pop("cumsum of bool")  # of that code, which is as it is
