"""How a kernel in Python stands in for one of the device: checked, counted, computed over the same bytes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.ascend.simulator import counters, faults, graphs, limits, runtime, workspaces
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
        register(
            namespace, name, over_device_memory(base, function, in_place or in_place_result(op))
        )
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


def launch(name: str, arguments: Arguments, options: Options) -> Tensor | None:
    """Counts a call, refuses what the device would, and fails where a test has planted a fault. Returns the workspace,
    which is there until the call has its results."""
    counters.kernels[name] += 1
    runtime.add("kernel")
    graphs.before_kernel()
    given = (*arguments, *options.values())
    limits.check(name, tensors_in(given))
    faults.before_kernel(name, given)
    return workspaces.take(name, tensors_in(given))


def over_device_memory(
    name: str, function: Kernel, in_place: InPlaceResult | None = None
) -> Kernel:
    """`function`, of tensors of the CPU, as a kernel of the device.

    What it returns that is one of its arguments is that argument; every other tensor goes to the device. `in_place` is
    given for a kernel that only writes into its arguments, and says what such a call returns: while a graph is captured
    it does not run.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        call = _Call(function, arguments, options, launch(name, arguments, options))
        if in_place is not None and graphs.is_deferred():
            call.forget_originals()
            graphs.note(call, [])
            return in_place(arguments, options)
        outputs: list[Tensor] = []
        made = _map(call(), lambda value: call.returned(value, outputs))
        if graphs.is_deferred():
            call.forget_originals()
            graphs.note(lambda: call.repeat(outputs), outputs)
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
