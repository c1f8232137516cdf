"""Whether steps that only generate are replayed from graphs, and the memory for that."""

import time
from collections.abc import Callable
from functools import partial

import structlog
import torch

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.graphs import Graphs, blank_step, graph_sizes
from services.decoder.loading.graph_trials import Trials
from services.decoder.models.cache_spec import paged_layers
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.worker.worker import Worker
from shared.errors import InvalidRequest

log = structlog.get_logger(__name__)

_BLOCKS = 3  # of a cache for a step that nobody asked for
_REPEATED = 10  # steps that are timed together, as they follow each other when they are served
_TOLERANCE = 0.02  # of the largest element: the same operations, perhaps in another order


def require_graphs(asked: str, device: Device) -> None:
    """Raises InvalidRequest where --graphs asks for what the device does not have."""
    if asked == "on" and not device.has_graphs:
        raise InvalidRequest(
            "UNSUPPORTED_GRAPHS",
            f"--graphs on: this device ({device.name}) has no graphs; they are on CUDA GPUs where one rank computes,"
            " and on Ascend NPUs from the 910B on. Leave the flag away, or give --graphs auto",
            field="graphs",
        )


def graph_bytes(
    asked: str, model: DecoderModel, device: Device, max_slots: int, max_model_len: int
) -> int:
    """What graphs will hold of the device's memory: the intermediate results of the largest one, which all share, and
    inputs and results of each. Known before there is a cache, to whose addresses they are bound; what drivers keep of
    each graph is in their reserve."""
    if asked == "off" or not device.has_graphs or _why_not(model, device):
        return 0
    ops, sizes, axes = device.ops, graph_sizes(max_slots), max(1, model.rotary_axes)
    width = -(-max_model_len // device.block_size)
    kv = [ops.alloc_kv(layer, _BLOCKS) for layer in paged_layers(model.layers)]

    def run() -> None:
        step = blank_step(ops, sizes[-1], axes, width)
        model.forward(model.embed(step.ids, (), ()), step, kv)

    with torch.inference_mode():
        most = device.peak_bytes(run)
    each_row = model.config.hidden_size * ops.dtype.itemsize + 8 * (axes + 2) + 4 * width
    return most + sum(sizes) * each_row


@torch.inference_mode()
def find_graphs(asked: str, model: DecoderModel, device: Device, worker: Worker) -> Graphs | None:
    """The graphs of a worker that has computed nothing yet; None where steps run without, which is logged with the
    reason. Several ranks come to the same, as their steps have to have the same rows."""
    if asked == "off" or not device.has_graphs:
        return None
    if reason := _why_not(model, device):
        _report(asked, reason)
        return None
    sizes = graph_sizes(worker.limits.max_slots)
    name = f"graphs of {sizes} rows, {worker.limits.max_model_len} tokens, {model.config}"
    if asked == "auto" and not _agree(device, not device.ended_within(name)):
        _report(asked, "an earlier start ended while they were tried; --graphs on tries them again")
        return None
    with device.surviving(name):
        return _checked(asked, model, device, worker)


def _checked(asked: str, model: DecoderModel, device: Device, worker: Worker) -> Graphs | None:
    began = time.perf_counter()
    sizes, axes = graph_sizes(worker.limits.max_slots), max(1, model.rotary_axes)
    width = worker.slots.table.shape[1]
    graphs: Graphs | None = None
    trials = Trials(model, device, worker)
    for check in [_is_captured, _agrees_with_calls, *([_is_faster] if asked == "auto" else [])]:
        try:
            graphs = graphs or device.make_graphs(worker.forward, sizes, axes, width)
            here = check(graphs, trials)
        except torch.OutOfMemoryError:
            log.warning("no graphs: the device's memory does not suffice to try them")
            here = False
        if not _agree(device, here):
            del graphs
            device.free_unused()
            return None
    assert graphs is not None
    log.info("graphs captured", rows=graphs.sizes, seconds=round(time.perf_counter() - began, 2))
    return graphs


def _agree(device: Device, here: bool) -> bool:
    """Whether it is so in all ranks."""
    return here if device.ops.ranks is None else device.ops.ranks.agree(here)


def _report(asked: str, reason: str) -> None:
    (log.warning if asked == "on" else log.info)("no graphs", reason=reason)


def _why_not(model: DecoderModel, device: Device) -> str:
    """Why the steps of a model cannot be graphs, as far as that is known before any is captured; empty if nothing is
    known against it."""
    if model.needs.state:  # where a row finds it differs from step to step
        return "the model's layers keep state outside the cache's blocks"
    if model.code != DecoderModel.code:
        return f"the model's layers run by the code of {model.code}"
    windows = (x for x in paged_layers(model.layers) if x.window is not None or x.chunk is not None)
    if not device.graphs_take_coded_windows and any(layer.coded for layer in windows):
        return "layers with a window attend to numbers that are made of the cache's codes (--kv-cache-dtype int8)"
    return ""


# What has to be true of graphs before they are used, in this order.


def _is_captured(graphs: Graphs, trials: Trials) -> bool:
    try:
        graphs.capture()
    except Exception as error:
        known = trials.device.translate(error)
        reason = str(error).strip().partition("\n")[0] if known is None else known.message
        log.warning("no graphs: they could not be captured", reason=reason)
        return False
    return True


def _agrees_with_calls(graphs: Graphs, trials: Trials) -> bool:
    """With other lengths than those of the capture."""
    with trials.filled_cache():
        for size in graphs.sizes:
            for step in trials.steps(size, graphs.longest(size)):
                expected = trials.call(step).float()
                difference = float((graphs.run(step) - expected).abs().max() / expected.abs().max())
                if not difference <= _TOLERANCE:
                    rows = f"a step of {size} {'row' if size == 1 else 'rows'}"
                    reason = f"{rows} gives something else: {difference:.2%} off"
                    log.warning("no graphs: they compute something else", reason=reason)
                    return False
    return True


def _is_faster(graphs: Graphs, trials: Trials) -> bool:
    """Of the smallest, a middle and the largest size together; the figures are logged."""
    called = replayed = 0.0
    sizes = graphs.sizes
    for place in sorted({0, len(sizes) // 2, len(sizes) - 1}):
        step = next(trials.steps(sizes[place]))
        one = _milliseconds(partial(trials.call, step), trials.device)
        other = _milliseconds(partial(graphs.run, step), trials.device)
        log.info(
            "timed steps",
            rows=sizes[place],
            ms_called=round(one, 3),
            ms_replayed=round(other, 3),
        )
        called, replayed = called + one, replayed + other
    if replayed >= called:
        log.info("no graphs: they are slower here")
    return replayed < called


def _milliseconds(run: Callable[[], object], device: Device) -> float:
    run()
    device.synchronize()
    began = time.perf_counter()
    for _ in range(_REPEATED):
        run()
    device.synchronize()
    return 1e3 * (time.perf_counter() - began) / _REPEATED
