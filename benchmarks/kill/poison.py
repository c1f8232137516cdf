"""A request whose decoder crashes each time it is computed, among others without fault: whether it alone is ended.

It is simulated by killing all decoders whenever the request runs: twice while it is in one batch with others, after
which it and they run alone for a moment, then repeatedly, each time with new requests beside it, until it is ended as
poisoned. It has `best_of` 2, so that it has no place in the log and stays isolated to its end. Which of the later kills
hits it is chance; none of the other requests is hit three times.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kill.registers import Registers
from benchmarks.kill.requests import PATH, Request, draw_requests
from benchmarks.kill.run import KillRun
from benchmarks.kill.settings import KillSettings
from benchmarks.kill.target import POLL_S, WHOLE_WITHIN_S, poll
from benchmarks.kill.transcript import Transcript
from benchmarks.load.errors import BenchError
from services.launcher.supervise.process_table import Entry, read_process_table
from shared.client.http import HttpClient, HttpError, HttpRefusal

_BESIDE = 6  # streams that run at the same time
_MOST_KILLS = 12
_COMPUTED_S = 0.3  # after all have tokens: by then the poison request has been computed too
_SUSPECT = 2  # lost decoders after which a request runs alone
_POISONED = "decoders were lost while they ran this request"


@dataclass
class Poisoned:
    """What became of the poison request and of the others.

    `kills`: how often the decoders were killed. `lost_decoders`: what Redis counted for the request (those after which
    it ran again). `after_first_kill`: the most that Redis counted for any request after the first kill.
    """

    kills: int = 0
    status: int = 0  # HTTP; 200 is an answer
    error: str = ""
    lost_decoders: int = 0
    after_first_kill: int = 0
    beside: list[tuple[Transcript, Transcript]] = field(default_factory=list)

    def problems(self, settings: KillSettings) -> list[str]:
        """What should not be; empty if all is well."""
        found = []
        if self.status != 500 or _POISONED not in self.error:
            told = f"{self.status} {self.error}"
            found.append(f"the poison request was told {told!r} after {self.kills} kills")
        elif self.lost_decoders != _SUSPECT:
            found.append(f"the poison request was ended with lost decoder {self.lost_decoders + 1}")
        if self.after_first_kill >= _SUSPECT:
            found.append(f"{self.after_first_kill} lost decoders were counted after one kill")
        failed = [after for _, after in self.beside if after.error or after.lost or after.doubled]
        if failed:
            found.append(f"{len(failed)} requests beside it were harmed: {failed[0].error}")
        differ = sum(not before.equals(after) for before, after in self.beside if not after.error)
        if differ and settings.expect_equal:
            found.append(f"{differ} answers beside it differ from the undisturbed run")
        return found

    def text(self, settings: KillSettings) -> str:
        """A line for the terminal."""
        said = "; ".join(self.problems(settings)) or "it alone was ended"
        return (
            f"poison request       {self.kills} kills, {len(self.beside)} streams beside it: {said}"
        )


class PoisonRun:
    """One such measurement on the processes of a `tessera serve`."""

    def __init__(self, settings: KillSettings, state: Path, run: KillRun) -> None:
        """`run` sends the other requests. Raises BenchError if no system of processes is meant."""
        if settings.compose:
            raise BenchError("--poison is for the processes of a `tessera serve`, not --compose")
        self._settings = settings.model_copy(update={"num_requests": _BESIDE})
        self._state = state
        self._run = run
        system = read_process_table(state)
        self._model = system.model
        self._registers = Registers(system.redis_url, system.model)
        self._server = HttpClient(system.urls[0], settings.api_key)

    async def run(self) -> Poisoned:
        """Raises BenchError if the request cannot be killed as it should."""
        found = Poisoned()
        requests = draw_requests(self._settings, self._model)
        reference = await asyncio.gather(*(self._run.ask(n, r) for n, r in enumerate(requests)))
        before = await self._registers.lost_decoders()
        poison = asyncio.create_task(self._send())
        try:
            rid = await self._appears(set(before), poison)
            await self._among(requests, reference, found, kills=_SUSPECT, rid=rid, poison=poison)
            while not poison.done() and found.kills < _MOST_KILLS:
                await self._among(requests, reference, found, kills=1, rid=rid, poison=poison)
            found.lost_decoders = (await self._registers.lost_decoders()).get(rid, 0)
            if poison.done():
                found.status, found.error = poison.result()
        finally:
            poison.cancel()
            await asyncio.gather(poison, return_exceptions=True)
            await self._registers.close()
            self._server.close()
        return found

    async def _among(
        self,
        requests: list[Request],
        reference: list[Transcript],
        found: Poisoned,
        *,
        kills: int,
        rid: str,
        poison: "asyncio.Task[tuple[int, str]]",
    ) -> None:
        """Kills all decoders `kills` times while these requests are read, and reads them to their ends."""
        reading = [asyncio.create_task(self._run.ask(n, r)) for n, r in enumerate(requests)]
        try:
            for _ in range(kills):
                await self._all_have_tokens(reading, time.perf_counter())
                if poison.done():
                    break
                await self._kill()
                found.kills += 1
                lost = await self._registers.lost_decoders()
                if found.kills == 1:
                    found.after_first_kill = max(lost.values(), default=0)
                if found.kills <= _SUSPECT and lost.get(rid, 0) != found.kills:
                    raise BenchError("the poison request was not being computed when it should be")
            answers = await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        found.beside += zip(reference, answers, strict=True)

    async def _all_have_tokens(
        self, reading: "list[asyncio.Task[Transcript]]", since: float
    ) -> None:
        """Waits until each stream that has not ended has a token newer than that, and a little longer."""

        async def is_so() -> bool:
            running = self._run.running
            waiting = [t for t in running if not t.times or t.times[-1] < since]
            return all(task.done() for task in reading) or (bool(running) and not waiting)

        await poll(is_so, self._settings.patience, "a token of every stream")
        await asyncio.sleep(_COMPUTED_S)

    async def _kill(self) -> None:
        """Kills all decoders at once, and waits until they are back."""
        hit = read_process_table(self._state).of_service("decoder")
        for entry in hit:
            if entry.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry.pid, signal.SIGKILL)

        async def is_back() -> bool:
            now = {
                entry.name: entry for entry in read_process_table(self._state).of_service("decoder")
            }
            return all(_is_new(now[entry.name], entry) for entry in hit)

        await poll(is_back, WHOLE_WITHIN_S, "starting the decoders again")

    async def _send(self) -> tuple[int, str]:
        """Asks for as long an answer as there can be. Returns the HTTP status and the error."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": "Tell me everything."}],
            "best_of": 2,
            "temperature": 0.8,
            "ignore_eos": True,
            "max_tokens": await self._longest(),
        }
        pieces: list[bytes] = []
        try:
            await self._server.request("POST", PATH, json.dumps(body).encode(), pieces.append)
        except HttpRefusal as error:
            return error.status, error.reason
        except HttpError as error:
            return 0, str(error)
        return 200, ""

    async def _longest(self) -> int:
        """Tokens of an answer that outlasts all others."""
        pieces: list[bytes] = []
        await self._server.request("GET", "/v1/models", b"", pieces.append)
        card = json.loads(b"".join(pieces))["data"][0]
        return int(card["max_model_len"]) * 3 // 4

    async def _appears(self, known: set[str], poison: "asyncio.Task[tuple[int, str]]") -> str:
        """Its name, when it is in the queue."""
        until = time.perf_counter() + self._settings.patience
        while time.perf_counter() < until and not poison.done():
            new = (await self._registers.lost_decoders()).keys() - known
            if new:
                return new.pop()
            await asyncio.sleep(POLL_S)
        raise BenchError("the poison request did not come into the queue, or ended at once")


def _is_new(now: Entry, before: Entry) -> bool:
    return now.crashes > before.crashes and now.state == "ready"
