"""Events with which the host lets a captured graph go on: their calls are told to `graphs`."""

from typing import Any

from torch_npu import npu

from tests.ascend.simulator import graphs, streams


def install() -> None:
    """Wraps the methods of `torch_npu.npu.ExternalEvent`."""
    _wrap("wait", graphs.event_waited)
    _wrap("reset", graphs.event_reset)
    _wrap("record", graphs.event_recorded)


def _wrap(name: str, tell: Any) -> None:
    original = getattr(npu.ExternalEvent, name)

    def call(event: Any, *arguments: Any, **options: Any) -> Any:
        result = original(event, *arguments, **options)
        streams.drain()
        tell(event)
        return result

    setattr(npu.ExternalEvent, name, call)
