"""How a kernel in Python stands in for one of the device: checked, counted, computed over the same bytes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.ascend.simulator import ai_cpu, counters, faults, graphs, limits, streams, workspaces
from tests.ascend.simulator.memory import host_view, on_device, to_device

Kernel = Callable[..., Any]
Arguments = tuple[Any, ...]
Options = dict[str, Any]
InPlaceResult = Callable[[Arguments, Options], Any]

_libraries: dict[str, torch.library.Library] = {}
_registered: set[tuple[str, str]] = set()
_CPU = torch.device("cpu")


def register(namespace: str, name: str, kernel: Kernel) -> None:
    """Makes `kernel` what torch calls for an op with arguments on the NPU."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL", "PrivateUse1")
    _libraries[namespace].impl(name, kernel, allow_override=True)
    _registered.add((namespace, name))


def is_registered(namespace: str, name: str) -> bool:
    """Whether an op, named with its overload, has a kernel of the simulator."""
    return (namespace, name) in _registered


def kernel(
    namespace: str, name: str, in_place: InPlaceResult | None = None
) -> Callable[[Kernel], Kernel]:
    """Decorates what computes an op on tensors of the CPU; `in_place` as for `over_device_memory`."""

    def decorate(function: Kernel) -> Kernel:
        base, _, overload = name.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        result = in_place or in_place_result(op)
        register(namespace, name, over_device_memory(base, function, result, written_by(op)))
        return function

    return decorate


def in_place_result(op: Any) -> InPlaceResult | None:
    """For an op that only writes into its arguments: what a call of it returns. None for all others."""
    schema = op._schema
    written = {
        _alias(argument): index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    returned = [_alias(result) for result in schema.returns]
    if not written or not written.keys() >= set(returned) or "" in returned:
        return None
    places = [written[alias] for alias in returned]
    names = [argument.name for argument in schema.arguments]

    def result(arguments: Arguments, options: Options) -> Any:
        found = [arguments[i] if i < len(arguments) else options[names[i]] for i in places]
        return found[0] if len(found) == 1 else tuple(found) or None

    return result


def written_by(op: Any) -> Callable[[Arguments, Options], list[Tensor]]:
    """Which of its arguments a call of an op writes."""
    written = [
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def find(arguments: Arguments, options: Options) -> list[Tensor]:
        values = (
            arguments[index] if index < len(arguments) else options.get(name)
            for index, name in written
        )
        return [value for value in tensors_in(values) if on_device(value)]

    return find


def nothing(arguments: Arguments, options: Options) -> list[Tensor]:
    """Of an op that writes none of its arguments."""
    return []


def _alias(value: Any) -> str:
    """The letter by which a schema says that a result is an argument; "" for none."""
    return "" if value.alias_info is None else next(iter(value.alias_info.before_set), "")


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """All tensors among arguments, those in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def launch(name: str, arguments: Arguments, options: Options) -> int:
    """Counts a call, refuses what the device would, and fails where a test has planted a fault. Returns the stream."""
    counters.kernels[name] += 1
    stream = streams.current()
    graphs.before_kernel()
    tensors = list(tensors_in((*arguments, *options.values())))
    limits.check(name, tensors)
    ai_cpu.note(name, tensors)
    faults.before_kernel(name, (*arguments, *options.values()))
    return stream


def run_on(stream: int, again: Callable[[], object], used: list[streams.Range]) -> None:
    """Runs a kernel that writes into memory of the device; while a graph is captured it is kept for its replays."""
    if graphs.is_deferred():
        graphs.note(again, [], used)
        return
    streams.begin(stream)
    again()
    streams.used(stream, used)


def over_device_memory(
    name: str,
    function: Kernel,
    in_place: InPlaceResult | None = None,
    written: Callable[[Arguments, Options], list[Tensor]] = nothing,
) -> Kernel:
    """`function`, of tensors of the CPU, as a kernel of the device.

    What it returns that is one of its arguments is that argument; every other tensor goes to the device. `in_place` is
    given for a kernel that only writes into its arguments, and says what such a call returns: while a graph is captured
    it does not run. written: which of its arguments a call writes.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        stream = launch(name, arguments, options)
        workspace = workspaces.take(name, tensors_in((*arguments, *options.values())), stream)
        call = _Call(function, arguments, options, workspace)
        used = streams.ranges(
            tensors_in((*arguments, *options.values())), written(arguments, options)
        )
        if graphs.is_deferred():
            return deferred(call, arguments, options, used)
        streams.begin(stream)
        outputs: list[Tensor] = []
        made = _map(call(), lambda value: call.returned(value, outputs))
        streams.used(stream, used + streams.ranges((), outputs))
        return made

    def deferred(
        call: "_Call", arguments: Arguments, options: Options, used: list[streams.Range]
    ) -> Any:
        if in_place is not None:
            call.forget_originals()
            graphs.note(call, [], used)
            return in_place(arguments, options)
        outputs: list[Tensor] = []
        made = _map(call(), lambda value: call.returned(value, outputs))
        call.forget_originals()
        used += streams.ranges((), outputs)
        graphs.note(lambda: call.repeat(outputs), outputs, used)
        return made

    return run


class _Call:
    """One call, with its arguments as tensors of the CPU. `workspace`: what it has until its results are there."""

    def __init__(
        self, function: Kernel, arguments: Arguments, options: Options, workspace: Tensor | None
    ) -> None:
        self._function, self._workspace = function, workspace
        self._originals: dict[int, Tensor | None] = {}
        self._arguments = [_map(value, self._lowered) for value in arguments]
        self._options = {name: _map(value, self._lowered) for name, value in options.items()}

    def __call__(self) -> Any:
        return self._function(*self._arguments, **self._options)

    def _lowered(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CPU if value.type == "npu" else value
        if not on_device(value):
            return value
        view = host_view(value)
        self._originals[id(view)] = value
        return view

    def returned(self, value: Any, outputs: list[Tensor]) -> Any:
        """What the caller gets for a result; new tensors are added to `outputs`."""
        if id(value) in self._originals:
            return self._originals[id(value)]
        if not isinstance(value, Tensor):
            return value
        made = to_device(value)
        outputs.append(host_view(made))
        return made

    def forget_originals(self) -> None:
        """A graph does not keep tensors from being freed: its memory pool does, where it is asked to."""
        self._originals = dict.fromkeys(self._originals)
        self._workspace = None

    def repeat(self, outputs: list[Tensor]) -> None:
        """Computes again, into the memory of the first results."""
        results = self()
        values = tensors_in(results if isinstance(results, (list, tuple)) else [results])
        fresh = [value for value in values if id(value) not in self._originals]
        for output, value in zip(outputs, fresh, strict=True):
            output.copy_(value)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_map(part, change) for part in value])
    return change(value)
