"""A device that computes on the CPU but transfers as an accelerator does: late."""

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.loading.load import Loaded, load
from services.decoder.settings import DecoderSettings

_POISON = 0xA5


class DeferredDevice(CpuDevice):
    """Copies end when an event after them is waited for, never before. Until then what was copied to the host is
    poison, and host memory that is still being copied from must not change. `counts` has what was asked for.
    """

    asynchronous: ClassVar[bool] = True
    upload = Device.upload
    download = Device.download

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._pending: list[Callable[[], None]] = []
        self._done = 0  # pending copies that have ended, from the first one on

    def pin(self, size: int) -> Tensor:
        """Filled with poison."""
        return torch.full((size,), _POISON, dtype=torch.uint8)

    def copy_to_device(self, host: Tensor) -> Tensor:
        """What is computed next finds the content; the host memory is read until the copy ends."""
        self.counts["host to device"] += 1
        seen = host.clone()

        def end() -> None:
            if not torch.equal(seen, host):
                self.faults.append("host memory changed while it was being copied to the device")

        self._pending.append(end)
        return seen.clone()

    def copy_to_host(self, here: Tensor, host: Tensor) -> None:
        """The content arrives when the copy ends."""
        self.counts["device to host"] += 1
        content = here.clone()
        host.fill_(_POISON)

        def end() -> None:
            host.copy_(content)

        self._pending.append(end)

    def record_event(self) -> "DeferredEvent":
        """After all copies so far."""
        return DeferredEvent(self, len(self._pending))

    def end_copies(self, count: int) -> None:
        """Ends the first `count` copies that were ever submitted."""
        for end in self._pending[self._done : count]:
            end()
        self._done = max(self._done, count)

    def synchronize(self) -> None:
        """Ends all copies."""
        self.counts["synchronisations"] += 1
        self.end_copies(len(self._pending))


class DeferredEvent:
    """A mark after some copies of a `DeferredDevice`."""

    def __init__(self, device: DeferredDevice, copies: int) -> None:
        self._device, self._copies = device, copies

    def synchronize(self) -> None:
        """Ends them."""
        self._device.counts["event waits"] += 1
        self._device.end_copies(self._copies)


def load_deferred(settings: DecoderSettings) -> Loaded:
    """A decoder on a `DeferredDevice`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.decoder.loading.load.device_class", lambda name: DeferredDevice)
        return load(settings)


LOADS = {"cpu": load, "deferred": load_deferred}
