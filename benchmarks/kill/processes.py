"""The processes of a `tessera serve` on this machine."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from random import Random

import psutil

from benchmarks.kill.full_disk import FullDisk
from benchmarks.kill.overload import OVERLOADS
from benchmarks.kill.registers import Registers
from benchmarks.kill.target import WHOLE_WITHIN_S, Strike, poll
from benchmarks.kill.victims import Victim
from benchmarks.load.errors import BenchError
from services.launcher.supervise.process_table import Entry, System, read_process_table
from shared.errors import Unavailable

_MISSED_WITHIN_S = 10.0
_CRASH_SHOWS_S = 7.0  # a process that does not answer is given up after five seconds
_SIGNALS = {
    "kill": signal.SIGKILL,
    "full-disk": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
}


class Processes:
    """Found by the file that the launcher keeps in its state folder."""

    def __init__(self, state: Path) -> None:
        """Raises BenchError if no system runs there."""
        self._state = state
        system = self._read()
        self.urls = system.urls
        self._registers = Registers(system.queue_url, system.model)
        self._disk = FullDisk(state)
        self._hit: dict[int, list[tuple[Entry, str]]] = {}
        self._crashes: dict[int, dict[str, int]] = {}  # of each process, before a strike

    async def strike(self, victim: Victim, draw: Random) -> Strike:
        """Signals one process of each service. What a load does begins with `follow`."""
        entries = [self._drawn(service, draw) for service in victim.services]
        hit = [(e, await self._registers.instance(e.service, e.name)) for e in entries]
        number = _SIGNALS.get(victim.how, signal.SIGKILL)
        crashes = {entry.name: entry.crashes for entry in self._read().entries.values()}
        if victim.needs_full_disk:
            await asyncio.to_thread(self._disk.fill)
        strike = Strike(victim, [entry.name for entry in entries])
        for entry in entries:
            assert entry.pid is not None, "a ready process has an id"
            _signal(_other_rank(entry.pid) if victim.how == "rank" else entry.pid, number)
        self._hit[id(strike)], self._crashes[id(strike)] = hit, crashes
        return strike

    async def follow(self, strike: Strike, freeze_s: float) -> None:
        """See Target."""
        hit = self._hit.pop(id(strike))
        watches = [asyncio.create_task(self._missed(strike, e, i)) for e, i in hit if i]
        if strike.victim.overload:
            strike.hit = [await OVERLOADS[strike.victim.overload](self.urls[0], freeze_s)]
            await asyncio.sleep(_CRASH_SHOWS_S)
        elif strike.victim.freezes:
            await asyncio.sleep(freeze_s)
            for entry, _ in hit:
                assert entry.pid is not None
                _signal(entry.pid, signal.SIGCONT)
        else:
            if strike.victim.needs_full_disk:
                await asyncio.sleep(freeze_s)
                self._disk.free()
            await poll(lambda: self._replaced(hit), WHOLE_WITHIN_S, "noticing a crash")
            strike.noticed_s = time.perf_counter() - strike.at
        await poll(self._is_whole, WHOLE_WITHIN_S, "becoming whole again")
        strike.whole_s = time.perf_counter() - strike.at
        await asyncio.gather(*watches)
        before = self._crashes.pop(id(strike))
        strike.bystanders = [
            entry.name
            for entry in self._read().entries.values()
            if entry.crashes > before[entry.name] and entry.name not in strike.hit
        ]

    async def close(self) -> None:
        """Closes the connection to Redis, and frees the disk."""
        self._disk.free()
        await self._registers.close()

    def _read(self) -> System:
        try:
            return read_process_table(self._state)
        except Unavailable as error:
            raise BenchError(f"{error.message}: give --state-dir, --port or --launch") from None

    def _drawn(self, service: str, draw: Random) -> Entry:
        ready = [entry for entry in self._read().of_service(service) if entry.state == "ready"]
        if not ready:
            raise BenchError(f"this system has no {service} that could be killed")
        return draw.choice(ready)

    async def _replaced(self, hit: list[tuple[Entry, str]]) -> bool:
        entries = self._read().entries
        return all(entries[e.name].crashes > e.crashes for e, _ in hit)

    async def _is_whole(self) -> bool:
        return all(entry.state == "ready" for entry in self._read().entries.values())

    async def _missed(self, strike: Strike, entry: Entry, instance: str) -> None:
        with contextlib.suppress(BenchError):  # it came back before anybody noticed
            await poll(
                lambda: self._registers.misses(entry.service, instance),
                _MISSED_WITHIN_S,
                "a notice",
            )
            strike.missed_s = max(strike.missed_s or 0.0, time.perf_counter() - strike.at)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _other_rank(decoder: int) -> int:
    """One of the processes that compute with a decoder's. Raises BenchError if there is none."""
    ranks = psutil.Process(decoder).children()
    if not ranks:
        raise BenchError("this decoder computes alone: give --tensor-parallel-size")
    return ranks[-1].pid
