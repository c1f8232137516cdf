"""A second process that computes gradients too, without being waited for.

Two threads in one process wait for each other at every product; where other programs want the
processor as well, that costs most of the speed. Here neither waits: the helper takes the newest
weights, works out the gradient of a batch of its own, and the next step of the main process takes
it along, one step late at most.
"""

from __future__ import annotations

import os
import queue
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from examples.demo_model.training.data import Background


class Helper:
    """One such process, seen from the main one."""

    def __init__(self, modules: list[nn.Module], source: Background, make: Any, *args: Any) -> None:
        """make(*args) builds, in the other process, an object with `modules` and `gradients`."""
        self._parameters = [p for m in modules for p in m.parameters()]
        total = sum(p.numel() for p in self._parameters)
        self._weights = _shared(total)
        self._gradients = _shared(total)
        context = mp.get_context("spawn")
        self._ready = context.Value("i", 0)
        self.publish()
        self._process = context.Process(
            target=_help,
            daemon=True,
            args=(make, args, source.queue, self._weights, self._gradients, self._ready),
        )
        self._process.start()

    def publish(self) -> None:
        """Lets the helper see the newest weights."""
        with torch.no_grad():
            for p, part in _parts(self._parameters, self._weights):
                part.copy_(p)

    def join(self) -> bool:
        """Adds the helper's gradient to ours, as a mean, if it has one ready."""
        if not self._ready.value:
            return False
        for p, part in _parts(self._parameters, self._gradients):
            if p.grad is None:
                p.grad = part.clone()
            else:
                p.grad.add_(part).mul_(0.5)
        self._ready.value = 0
        return True

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _shared(size: int) -> Tensor:
    share: Any = torch.zeros(size, dtype=torch.bfloat16)
    flat: Tensor = share.share_memory_()
    return flat


def _parts(parameters: list[nn.Parameter], flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its stretch of the flat tensor."""
    parts, at = [], 0
    for p in parameters:
        parts.append((p, flat[at : at + p.numel()].view_as(p)))
        at += p.numel()
    return parts


def _help(
    make: Any, args: Any, source: Any, weights: Tensor, gradients: Tensor, ready: Any
) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    run = make(*args)
    parameters = [p for m in run.modules for p in m.parameters()]
    while os.getppid() == parent:
        if ready.value:
            time.sleep(0.02)
            continue
        try:
            batch = source.get(timeout=5)
        except queue.Empty:
            continue
        with torch.no_grad():
            for p, part in _parts(parameters, weights):
                p.copy_(part)
                p.grad = None
        run.gradients(batch)
        for p, part in _parts(parameters, gradients):
            if p.grad is None:
                part.zero_()
            else:
                part.copy_(p.grad)
        ready.value = 1
