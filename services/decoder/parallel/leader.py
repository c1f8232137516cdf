"""The first rank's hold on the others: it starts them, tells them what it does, and ends when one of them fails."""

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import structlog

from services.decoder.parallel import messages
from services.decoder.parallel.messages import NUMBER, Order, Report
from services.decoder.parallel.place import Place
from services.decoder.settings import DecoderSettings
from shared.child_process.activity import ProcessActivity
from shared.child_process.die_with_parent import die_with_parent
from shared.hardware import ascend
from shared.hardware.devices import resolve_device
from shared.settings import (
    child_environment,
    listed_in_environment,
    python_path,
    set_process_environment,
)

log = structlog.get_logger(__name__)

_ROOT = Path(__file__).parents[3]
_STARTING_S = 120.0  # until its libraries are imported
_SILENCE_S = 10.0  # without work; a rank's event loop reports every second
_COMPUTED_S = 100.0  # of processor time, by one thread, while nothing is heard: it will not end
_LONGEST_S = 600.0  # in which nothing is heard, whatever its threads do
_LOOK_S = 1.0
_DYING_S = 2.0  # between a call that fails and what tells which rank is gone
_END_S = 5.0
# By which a process is given one of several accelerators.
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}

# The rank, the number of the fetch, and whether its artifact was lost.
OnFetched = Callable[[int, int, bool], None]


@dataclass
class _Other:
    """One of the other ranks."""

    rank: int
    process: "subprocess.Popen[bytes]"
    orders: socket.socket
    reports: socket.socket


class Leader:
    """Everything but `close` may be called on any thread."""

    def __init__(self, place: Place, meeting: int) -> None:
        """meeting: the descriptor of a file without a name, by which the ranks find each other: nothing is left of it
        however they end. It stays open: torch opens the file again whenever its store is destroyed."""
        self.place = place
        self._meeting = meeting
        self._others: list[_Other] = []
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._closing = False
        self._on_fetched: OnFetched = lambda rank, number, lost: None

    @classmethod
    def start(cls, settings: DecoderSettings) -> Self:
        """Starts the other ranks, which end with this thread; called before this process imports what it computes with,
        so that they do so at the same time. Raises InvalidRequest for a device that is not there."""
        device = resolve_device(settings.device)
        if device == "npu" and settings.graphs != "off" and not ascend.is_310p():
            set_process_environment(**ascend.ENVIRONMENT_OF_CAPTURED_RANKS)
        meeting = os.memfd_create("tessera-ranks")
        path = Path(f"/proc/self/fd/{meeting}")  # the same in every rank, which inherits it
        leader = cls(Place.among(settings, 0, path), meeting)
        for rank in range(1, settings.tensor_parallel_size):
            leader._start(Place.among(settings, rank, path), device)
        log.info("ranks started", ranks=settings.tensor_parallel_size)
        return leader

    def listen(self, on_fetched: OnFetched) -> None:
        """Calls it, on a thread of each rank's, with what becomes of artifacts there."""
        self._on_fetched = on_fetched

    def send(self, order: Order, payload: bytes = b"") -> None:
        """Tells every other rank. Ends this process if one of them does not read."""
        with self._sending:
            if self._closing:
                return
            for other in self._others:
                try:
                    messages.send(other.orders, order, payload)
                except TimeoutError:
                    self._lose(other, f"it has taken no orders for {_LONGEST_S:.0f} s")
                except OSError as error:
                    self.fail(error)

    def fail(self, error: Exception) -> NoReturn:
        """Ends this process for a failure in a call of all ranks: what they hold is no longer the same."""
        if self._closing:
            raise error
        time.sleep(_DYING_S)  # most often another rank is gone, and is named
        self._end("a step of several ranks failed", 0, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends the other ranks."""
        self._closing = True
        for other in self._others:
            other.orders.close()
        for other in self._others:
            try:
                other.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                other.process.kill()
                other.process.wait()

    def _start(self, place: Place, device: str) -> None:
        rank = place.rank
        own_orders, orders = socket.socketpair()
        own_reports, reports = socket.socketpair()
        own_orders.settimeout(_LONGEST_S)  # a rank that does not read is not heard of either
        descriptors = (orders.fileno(), reports.fileno())
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "services.decoder.follower",
                *map(str, descriptors),
            ],
            env=child_environment(
                PYTHONPATH=python_path(_ROOT, _ROOT / "protos"), **_visible(device, rank)
            ),
            stdin=subprocess.DEVNULL,
            pass_fds=(*descriptors, self._meeting),
            preexec_fn=die_with_parent(),
        )
        orders.close()
        reports.close()
        other = _Other(rank, process, own_orders, own_reports)
        self._others.append(other)
        messages.send(own_orders, Order.START, place.to_json().encode())
        name = f"rank {rank}"
        threading.Thread(target=self._watch, args=(other,), name=name, daemon=True).start()

    def _watch(self, other: _Other) -> None:
        """Takes in what a rank reports until it is gone or hangs."""
        silence_s = _STARTING_S
        with other.reports:
            try:
                while True:
                    if cause := _wait_for_report(other, silence_s):
                        self._lose(other, cause)
                        return
                    self._take(other, *messages.receive(other.reports))
                    silence_s = _SILENCE_S
            except EOFError:
                self._lose(other, _end_of(other.process))

    def _take(self, other: _Other, kind: int, payload: bytes) -> None:
        if kind == Report.FAILED:
            self._lose(other, payload.decode())
        elif kind in (Report.FETCHED, Report.LOST):
            [number] = NUMBER.unpack(payload)
            self._on_fetched(other.rank, number, kind == Report.LOST)

    def _lose(self, other: _Other, cause: str) -> None:
        """Without all of its ranks a decoder has no model: it ends, and is started anew."""
        if self._closing:
            return
        self._end("a rank is lost", other.rank, cause)

    def _end(self, what: str, rank: int, cause: str) -> NoReturn:
        with self._ending:  # what fails next fails for the same reason
            log.error(f"the decoder ends: {what}", rank=rank, cause=cause)
            os._exit(1)


def _wait_for_report(other: _Other, silence_s: float) -> str:
    """Waits until there is something to receive of a rank, or that it is gone.

    Why it counts as hanging instead, empty if it does not: one whose threads are at work may only need longer, as on a
    machine with too much to do.
    """
    waiting = select.poll()
    waiting.register(other.reports, select.POLLIN)
    activity = None
    heard = worked = time.monotonic()
    while not waiting.poll(1000 * _LOOK_S):
        now = time.monotonic()
        activity = activity or ProcessActivity(other.process.pid)
        if activity.is_busy():
            worked = now
        if activity.used_since_s >= _COMPUTED_S:
            return f"nothing was heard of it while a thread computed for {_COMPUTED_S:.0f} s"
        if now - heard >= _LONGEST_S:
            return f"nothing was heard of it for {_LONGEST_S:.0f} s"
        if now - worked >= silence_s:
            return f"nothing was heard of it for {now - heard:.0f} s, and it does nothing"
    return ""


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    try:
        status = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "it closed its socket"
    return (
        f"its process was ended by signal {-status}"
        if status < 0
        else f"it exited with status {status}"
    )


def _visible(device: str, rank: int) -> dict[str, str]:
    """The variable that shows a rank its own device alone, of those that this process sees."""
    name = _VISIBLE.get(device)
    if name is None:
        return {}
    return {name: listed_in_environment(name, rank) or str(rank)}
