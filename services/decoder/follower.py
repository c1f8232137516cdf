"""`python -m services.decoder.follower ORDERS REPORTS`: a rank other than the first, which starts it.

It runs the worker that the first rank runs, on the same plans, and drops the results. The arguments are the numbers of
two sockets.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections import deque
from functools import partial
from typing import NoReturn

import structlog

from services.decoder.loading.load import load_rank
from services.decoder.parallel import messages
from services.decoder.parallel.embeddings import FollowingEmbeddings
from services.decoder.parallel.messages import NUMBER, Order, Report
from services.decoder.parallel.place import Place
from services.decoder.worker.executor import Executor
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.plans.plan import Plan
from services.decoder.worker.worker import Worker
from shared import service_process
from shared.cpu_kernels import host_memory
from shared.errors import ServingError
from shared.hardware import ascend
from shared.settings import set_process_environment
from shared.telemetry.logs import configure_logs
from tessera.decoder.v1.decoder_pb2 import StepPlan

log = structlog.get_logger(__name__)

_ALIVE_S = 1.0


class Follower:
    """Does what the first rank says, in its order: `take` on the event loop, the rest on the compute thread."""

    def __init__(self, worker: Worker, executor: Executor, reports: "Reports") -> None:
        self._worker = worker
        self._executor = executor
        self._reports = reports
        self._plans: deque[Plan] = deque()
        self._launched: deque[LaunchedStep] = deque()

    def take(self, kind: int, payload: bytes) -> None:
        """One order."""
        if kind == Order.PLAN:
            self._plans.append(self._worker.accept(StepPlan.FromString(payload)))
            return
        if kind == Order.LAUNCH:
            lease, step, drafts = messages.read_launch(payload)
            plan = self._find(lease, step)
            if len(plan.row_drafts):
                plan.proposed = drafts
            job = partial(self._launch, plan)
        else:
            job = partial(self._collect if kind == Order.COLLECT else self._reset)
        self._executor.submit(partial(self._reports.failing, job))

    def _find(self, lease: int, step: int) -> Plan:
        """The plan that is launched now; those before it never will be."""
        while (plan := self._plans.popleft()).lease != lease or plan.step != step:
            pass
        return plan

    def _launch(self, plan: Plan) -> None:
        # A plan that contradicts what is known is refused by every rank.
        with contextlib.suppress(ServingError):
            self._launched.append(self._worker.launch(plan))

    def _collect(self) -> None:
        self._worker.collect(self._launched.popleft(), lambda result: None)

    def _reset(self) -> None:
        self._launched.clear()
        self._worker.reset()
        assert self._worker.ranks is not None
        self._worker.ranks.wait()


class Reports:
    """What the first rank hears."""

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._sending = threading.Lock()

    def tell(self, number: int, lost: bool) -> None:
        """What became of a fetch."""
        self._send(Report.LOST if lost else Report.FETCHED, NUMBER.pack(number))

    async def stay_alive(self) -> None:
        """Says so as long as the event loop runs."""
        while True:
            self._send(Report.ALIVE)
            await asyncio.sleep(_ALIVE_S)

    def failing(self, job: "partial[None]") -> None:
        """Runs a job, with which the process ends if it fails."""
        try:
            job()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> NoReturn:
        """The process ends, and the first rank says why."""
        log.exception("this rank failed")
        self._send(Report.FAILED, f"{type(error).__name__}: {error}".encode())
        os._exit(1)

    def _send(self, kind: Report, payload: bytes = b"") -> None:
        with self._sending, contextlib.suppress(OSError):  # without the first rank nobody listens
            messages.send(self._to, kind, payload)


async def follow(place: Place, orders: socket.socket, reports: Reports) -> None:
    """Loads this rank's share and does what it is told, until the first rank is gone."""
    alive = asyncio.create_task(reports.stay_alive())
    executor = Executor()
    make = partial(FollowingEmbeddings, tell=reports.tell)
    try:
        loaded = await executor.run(lambda: load_rank(place, make))
    except Exception as error:
        reports.fail(error)
    service_process.settle()
    host_memory.make_present()
    assert loaded.device.ops.ranks is not None
    await executor.run(loaded.device.ops.ranks.settle)
    follower = Follower(loaded.worker, executor, reports)
    reader, writer = await asyncio.open_unix_connection(sock=orders)
    try:
        while True:
            follower.take(*await messages.read(reader))
    except EOFError:
        alive.cancel()
    except Exception as error:
        reports.fail(error)
    finally:
        writer.close()


def main(orders_number: str, reports_number: str) -> None:
    """Ends with the first rank."""
    orders, reports = (socket.socket(fileno=int(n)) for n in (orders_number, reports_number))
    set_process_environment(GOMP_SPINCOUNT="10000", **ascend.ENVIRONMENT)
    service_process.load_without_collecting()
    place = Place.from_json(messages.receive(orders)[1])
    settings = place.settings
    configure_logs(f"decoder.{place.rank}", settings.log_level, settings.log_format)

    async def run(stop: asyncio.Event) -> None:
        # Signals that end a group of processes reach this one too; the first rank says when it ends.
        await follow(place, orders, Reports(reports))
        os._exit(0)  # the compute thread may wait for a rank that is gone

    service_process.run(run, settings.internal_token_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
