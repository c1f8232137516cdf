"""`python -m tests.support.gateway.turns FILE [FLAG...]`: a gateway that notes in FILE for how long its event loop is
busy without a break.

What is measured is the processor time of the loop's thread, which other work on the machine does not change.
"""

import asyncio
import json
import mmap
import struct
import sys
import time
from pathlib import Path

from services.gateway.gateway import run_gateway
from services.gateway.settings import GatewaySettings
from shared import service_process
from shared.telemetry.logs import configure_logs

_EVERY_S = 0.001
_SECONDS = struct.Struct("d")
_WORK = json.dumps([["word", 1.5, {"a": None}]] * 20_000)
_WORK_S = 0.008


class LongestTurn:
    """The longest time in seconds that the loop's thread has computed between two of its turns, in a file that another
    process reads. What is shorter than a millisecond is not told apart.
    """

    def __init__(self, path: Path) -> None:
        """`path` is a new file, or one that the other side has made."""
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._last = 0.0

    @property
    def seconds(self) -> float:
        """What has been found since the last `reset`."""
        found: float = _SECONDS.unpack_from(self._page)[0]
        return found

    def reset(self) -> None:
        """Begins anew."""
        _SECONDS.pack_into(self._page, 0, 0.0)

    def watch(self) -> None:
        """Measures the running loop from now on."""
        self._last = time.thread_time()
        asyncio.get_running_loop().call_later(_EVERY_S, self._tick)

    def _tick(self) -> None:
        turn_s = time.thread_time() - self._last
        if turn_s > self.seconds:
            _SECONDS.pack_into(self._page, 0, turn_s)
        self.watch()


def slowness() -> float:
    """How much longer this machine computes than the one on which limits of processor time were set; at least 1."""
    found = []
    for _ in range(9):
        began = time.thread_time()
        json.loads(_WORK)
        found.append(time.thread_time() - began)
    return max(1.0, min(found) / _WORK_S)


def main() -> None:
    """A gateway as `python -m services.gateway` has it, watched."""
    turn = LongestTurn(Path(sys.argv.pop(1)))
    settings = GatewaySettings.load(prog="python -m tests.support.gateway.turns")
    configure_logs("gateway", settings.log_level, settings.log_format, quotes_errors=False)

    async def body(stop: asyncio.Event) -> None:
        turn.watch()
        await run_gateway(settings, stop)

    service_process.run(body)


if __name__ == "__main__":
    main()
