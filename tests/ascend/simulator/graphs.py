"""Captured graphs: kernels kept as closures over device memory, which run at each replay and not before.

The content of an output is NaN until the first replay. A graph stops at an event that nobody has recorded, as a device
does, and goes on when somebody does; whatever is launched behind a graph that stands still is refused.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from tests.ascend.simulator import runtime, streams
from tests.ascend.simulator.errors import Refused

Node = Callable[[], object]
_BEGIN, _END, _EXECUTE, _GROUP_BEGIN, _GROUP_END, _UPDATE_BEGIN, _UPDATE_END = range(1, 8)


class _Waits:
    """A node of a graph: it waits for an event that the host records (`torch_npu.npu.ExternalEvent`)."""

    def __init__(self, event: object) -> None:
        self.event = event

    def __call__(self) -> None:
        """Nothing; `_run` looks at the event."""


@dataclass
class _Graph:
    nodes: list[Node] = field(default_factory=list)
    used: set[streams.Range] = field(default_factory=set)


@dataclass
class _Capture:
    """Of one thread; `group` are the places of the kernels that can be updated together."""

    graph: _Graph
    thread: int
    group: list[int] | None = None


@dataclass
class _Update:
    graph: _Graph
    places: list[int]
    nodes: list[Node] = field(default_factory=list)


_graphs: dict[int | None, _Graph] = {}
_groups: dict[int | None, tuple[_Graph, list[int]]] = {}
_recorded: set[object] = set()
_standing: deque[Iterator[None]] = deque()
_errors: list[BaseException] = []
_capture: _Capture | None = None
_update: _Update | None = None


def is_capturing() -> bool:
    """Whether this thread captures a graph."""
    return _capture is not None and _capture.thread == threading.get_ident()


def is_updating() -> bool:
    """Whether kernels of a graph are given other arguments."""
    return _update is not None


def is_deferred() -> bool:
    """Whether a kernel that is launched now does not run now."""
    return _update is not None or is_capturing()


def note(again: Node, outputs: list[Tensor], used: Iterable[streams.Range]) -> None:
    """A kernel is launched: `again` computes it, into `outputs`, tensors over device memory that hold nothing yet."""
    if _update is not None:
        _update.nodes.append(again)
    elif is_capturing():
        assert _capture is not None
        _keep(_capture, again)
        _capture.graph.used.update(used)
        for output in outputs:
            if output.is_floating_point():
                output.fill_(float("nan"))


def _keep(capture: _Capture, node: Node) -> None:
    capture.graph.nodes.append(node)
    if capture.group is not None:
        capture.group.append(len(capture.graph.nodes) - 1)


def refuse_in_capture(what: str) -> None:
    """Raises Refused while a graph is captured: the device cannot wait for the host there."""
    if is_capturing():
        raise Refused(f"{what} cannot be captured (107041)")


def before_kernel() -> None:
    """Raises what went wrong in a replay, and Refused behind a graph that stands still."""
    _keep_collectives()
    if _errors:
        raise _errors.pop()
    if _standing and not is_deferred():
        _standing.clear()
        raise Refused(
            "a graph waits for an event that nobody has recorded; a device would hang here"
        )


def _run(graph: _Graph) -> Iterator[None]:
    """Runs the nodes in order; pauses where one waits."""
    for place in range(len(graph.nodes)):
        node = graph.nodes[place]
        while isinstance(node, _Waits) and node.event not in _recorded:
            yield
        graph.nodes[place]()  # what it is now: an update may have come meanwhile


def _go_on() -> None:
    """Runs the graphs that were replayed, one after the other, as far as they come."""
    while _standing:
        try:
            next(_standing[0])
            return
        except StopIteration:
            _standing.popleft()


def _begin() -> None:
    global _capture
    _capture = _Capture(_Graph(), threading.get_ident())


def _end(model: int | None) -> None:
    global _capture
    assert _capture is not None
    _keep_collectives()
    _graphs[model] = _capture.graph
    _capture = None


def _execute(model: int | None, stream: int | None) -> None:
    streams.used(stream or 0, sorted(_graphs[model].used))
    _standing.append(_run(_graphs[model]))
    _go_on()


def _group_begin() -> None:
    assert _capture is not None
    _capture.group = []


def _group_end(group: int | None) -> None:
    assert _capture is not None and _capture.group is not None
    _groups[group] = (_capture.graph, _capture.group)
    _capture.group = None


def _update_begin(group: int | None) -> None:
    global _update
    _update = _Update(*_groups[group])


def _update_end() -> None:
    global _update
    assert _update is not None
    update, _update = _update, None
    if len(update.nodes) != len(update.places):
        raise Refused(f"a group of {len(update.places)} kernels was updated by {len(update.nodes)}")
    for place, node in zip(update.places, update.nodes, strict=True):
        update.graph.nodes[place] = node


def _keep_collectives() -> None:
    """What torch_npu's thread has called while this one captures becomes nodes, in that order."""
    while is_capturing() and (call := runtime.take_collective()):
        assert _capture is not None
        _keep(_capture, partial(_repeat_collective, call))


def _repeat_collective(call: int) -> None:
    status = runtime.repeat_collective(call)
    if status:
        raise RuntimeError(f"HCCL function error: a collective in a graph, error code is {status}")


def hook(what: int, first: int | None, second: int | None) -> None:
    """Called by the runtime. What is raised here comes up at the next kernel, as errors of a device do."""
    steps: dict[int, Callable[[], None]] = {
        _BEGIN: _begin,
        _END: lambda: _end(second),
        _EXECUTE: lambda: _execute(first, second),
        _GROUP_BEGIN: _group_begin,
        _GROUP_END: lambda: _group_end(second),
        _UPDATE_BEGIN: lambda: _update_begin(second),
        _UPDATE_END: _update_end,
    }
    try:
        steps[what]()
    except BaseException as error:
        _errors.append(error)


def event_waited(event: object) -> None:
    """A stream waits for an event of the host: in a capture, every replay does."""
    if is_capturing():
        assert _capture is not None
        _keep_collectives()
        _keep(_capture, _Waits(event))


def event_reset(event: object) -> None:
    """An event of the host is to be recorded anew: in a capture, for every replay."""
    if is_capturing():
        assert _capture is not None
        _keep_collectives()
        _keep(_capture, lambda: _recorded.discard(event))
    else:
        _recorded.discard(event)


def event_recorded(event: object) -> None:
    """The host has recorded an event; graphs that waited for it go on."""
    _recorded.add(event)
    try:
        _go_on()
    except BaseException as error:
        _errors.append(error)
