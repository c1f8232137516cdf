"""A program that is kept running: its process is started, watched, and started again when it ends."""

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from services.launcher.supervise.hang import HangDetector
from services.launcher.supervise.probe import Condition
from services.launcher.supervise.process import PrewarmedProcess, Process, Program
from services.launcher.supervise.timings import USUAL, Timings
from shared.net.backoff import Backoff

log = structlog.get_logger(__name__)

_BACKOFF = Backoff(first_s=0.2, longest_s=5.0)  # the first restart is immediate
# Having been ready for so long, a run that ends resets the delays, and one that hangs also the patience.
_STEADY_AFTER_S = 5.0
_STEADY_BEFORE_HANGING_S = 60.0
_MOST_PATIENCE = 8.0
_FAILED_STARTS = 5
_PROBE_STEADY_S = 1.0
_PROBE_STARTING_S = 0.02
# Pauses between probes of a process that may be starved.
_UNANSWERED = Backoff(first_s=0.1, longest_s=1.0)
# Every process that could write to the pipe has ended: what it wrote is in the pipe.
_LAST_LINES_S = 0.2
_USAGE_ERROR = 2
_LINES_KEPT = 40


class GaveUp(Exception):
    """A program that does not start: its name, how it ended, its last lines."""

    def __init__(self, name: str, how: str, lines: Sequence[str]) -> None:
        super().__init__(f"{name} {how}")
        self.name, self.how, self.lines = name, how, lines


class SupervisedProcess:
    """Keeps a program running until `stop`.

    A program that ends is started again: at once, and after 0.2 s and up to 5 s when it keeps ending, but never before
    `Program.pause_s`. One that was ready and then hangs (`HangDetector`) is killed; if it keeps hanging, it is given
    twice the time after each kill, up to eight times. One that has never been ready and ends five times, or refuses
    its settings (status 2), makes `run` raise GaveUp.
    """

    def __init__(
        self,
        program: Program,
        *,
        on_state: Callable[[str, str], None],
        on_line: Callable[[str, str], None],
        timings: Timings = USUAL,
    ) -> None:
        """`on_state(name, state)` is called at each change of state, `on_line(name, line)` for each line printed."""
        self.program = program
        self.ready = asyncio.Event()
        self.crashes = 0
        self._on_state, self._on_line = on_state, on_line
        self._timings = timings
        self._process: Process | None = None
        self._prewarmed = PrewarmedProcess(program)
        self._was_ready = False
        self._ready_at: float | None = None  # of this run, not an earlier one
        self._hung = False  # this run
        self._hangs = 0  # runs in a row
        self._stopping = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)

    @property
    def name(self) -> str:
        """The program's name."""
        return self.program.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Runs it again and again until `stop`. Raises GaveUp."""
        ended = 0  # runs in a row that were too short
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            self._ready_at, self._hung = None, False
            status = await self._run_once()
            if self._stopping.is_set():
                break
            ready_s = loop.time() - self._ready_at if self._ready_at is not None else 0.0
            if ready_s >= (_STEADY_BEFORE_HANGING_S if self._hung else _STEADY_AFTER_S):
                ended = 0
            if ready_s >= _STEADY_BEFORE_HANGING_S:
                self._hangs = 0
            self._hangs += self._hung
            delay = max(self.program.pause_s, _BACKOFF.pause_s(ended) if ended else 0.0)
            self._give_up_if_hopeless(status)
            log.warning(
                f"{self.name} {_describe(status)}, starting it again",
                after_s=delay,
                crashes=self.crashes,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            ended += 1
        await self._prewarmed.close()
        self._on_state(self.name, "stopped")

    def retire(self) -> None:
        """Starts it no more: `run` returns once it has ended, for whatever reason."""
        self._stopping.set()
        self._prewarmed.cancel()

    def stop(self) -> None:
        """Asks it to end."""
        self.retire()
        self._on_state(self.name, "stopping")
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and all that it started, at once."""
        self.retire()
        self._signal(signal.SIGKILL, group=True)

    async def _run_once(self) -> int:
        """Runs one process to its end; its exit status, negative for a signal."""
        if self.program.socket is not None:
            self.program.socket.unlink(missing_ok=True)
        process = await self._prewarmed.take() or await Process.start(self.program)
        self._process = process
        self._on_state(self.name, "starting")
        if self._stopping.is_set():  # `stop` was called during the start
            self._signal(signal.SIGTERM)
        reading = asyncio.create_task(self._read(process.lines))
        watching = asyncio.create_task(self._watch())
        try:
            status = await process.wait()
            if not self._stopping.is_set():
                self.crashes += 1
                self._on_state(self.name, "restarting")
            return status
        finally:
            watching.cancel()
            self.ready.clear()
            self._signal(signal.SIGKILL, group=True)  # processes that it started
            self._process = None
            await asyncio.wait([reading], timeout=_LAST_LINES_S)
            reading.cancel()
            await asyncio.gather(watching, reading, return_exceptions=True)
            process.close()

    async def _read(self, lines: asyncio.StreamReader) -> None:
        """Passes its output on, line by line, until the other end is closed."""
        while True:
            try:
                line = await lines.readline()
            except ValueError:  # longer than the limit: it was dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            if not self.program.quiet:
                self._on_line(self.name, text)

    async def _watch(self) -> None:
        """Probes it; kills it when it has been ready and hangs."""
        hang: HangDetector | None = None  # once it has been ready
        unanswered = 0
        while True:
            within_s = self._timings.late_answer_s if unanswered else self._timings.answer_s
            condition = await self.program.probe.ask(within_s)
            self._note(condition)
            if condition is Condition.READY and hang is None and self.pid is not None:
                self._ready_at = asyncio.get_running_loop().time()
                patience = min(2.0**self._hangs, _MOST_PATIENCE)
                hang = HangDetector(self.name, self.pid, patience, self._timings)
            if condition is not Condition.SILENT:
                unanswered = 0
                if hang is not None:
                    hang.answered()
                await asyncio.sleep(_PROBE_STARTING_S if hang is None else _PROBE_STEADY_S)
            elif hang is None:
                await asyncio.sleep(_PROBE_STARTING_S)
            else:
                unanswered += 1
                await asyncio.sleep(_UNANSWERED.pause_s(unanswered))
                if cause := hang.cause():
                    log.error(f"{self.name} hangs, killing it", cause=cause)
                    self._hung = True
                    self._signal(signal.SIGKILL, group=True)
                    return

    def _note(self, condition: Condition) -> None:
        if self._stopping.is_set():
            return
        if condition is Condition.READY:
            self._was_ready = True
            if not self.ready.is_set():
                self.ready.set()
                self._on_state(self.name, "ready")
                loop = asyncio.get_running_loop()
                loop.call_later(self._timings.prewarm_after_s, self._prewarm)
        elif condition is Condition.ALIVE:
            self.ready.clear()
            self._on_state(self.name, "loading" if self._ready_at is None else "not ready")

    def _prewarm(self) -> None:
        if self.ready.is_set() and not self._stopping.is_set():
            self._prewarmed.prepare()

    def _give_up_if_hopeless(self, status: int) -> None:
        if self._was_ready:
            return
        if status == _USAGE_ERROR or self.crashes >= _FAILED_STARTS:
            self._on_state(self.name, "failed")
            raise GaveUp(self.name, _describe(status), list(self._lines))

    def _signal(self, number: signal.Signals, *, group: bool = False) -> None:
        if self._process is not None:
            self._process.signal(number, group=group)


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
