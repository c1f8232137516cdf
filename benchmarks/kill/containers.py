"""The containers of a `docker compose` project."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from random import Random

from benchmarks.kill.overload import OVERLOADS
from benchmarks.kill.target import WHOLE_WITHIN_S, Strike, poll
from benchmarks.kill.victims import Victim
from benchmarks.load.errors import BenchError

_COMMAND_S = 60.0
_GATEWAY_PORT = "8000"  # inside the container


class Containers:
    """Found by `docker compose ps` in this folder; started again by Docker's restart policy."""

    def __init__(self, project: str) -> None:
        """Raises BenchError if there is no such project, or no Docker."""
        self._compose = ["docker", "compose", *(["--project-name", project] if project else [])]
        address = _run([*self._compose, "port", "gateway", _GATEWAY_PORT]).strip()
        if not address:
            raise BenchError("no gateway of this project runs: `docker compose up --wait`")
        self.urls = [f"http://{address}"]
        # Container -> when it was started, before a strike: of those that it hit, and of all others.
        self._hit: dict[int, dict[str, str]] = {}
        self._others: dict[int, dict[str, str]] = {}

    async def strike(self, victim: Victim, draw: Random) -> Strike:
        """Kills the first process of a container, which Docker takes for a crash."""
        if victim.needs_full_disk:
            raise BenchError(
                "a disk is only filled for a system of its own: --launch, not --compose"
            )
        ids = [await self._drawn(service, draw) for service in victim.services]
        started = {container: await _started(container) for container in ids}
        others = {i: await _started(i) for i in await self._ids() if i not in started}
        strike = Strike(
            victim, [f"{r} {i[:12]}" for r, i in zip(victim.services, ids, strict=True)]
        )
        for container in ids:
            if victim.freezes:
                await _docker("pause", container)
            elif victim.how == "term":
                await _docker("restart", container)
            else:
                await _kill(container)
        self._hit[id(strike)], self._others[id(strike)] = started, others
        return strike

    async def follow(self, strike: Strike, freeze_s: float) -> None:
        """See Target."""
        hit = self._hit.pop(id(strike))
        if strike.victim.overload:
            strike.hit = [await OVERLOADS[strike.victim.overload](self.urls[0], freeze_s)]
        elif strike.victim.freezes:
            await asyncio.sleep(freeze_s)
            for container in hit:
                await _docker("unpause", container)
        else:
            await poll(lambda: _are_new(hit), WHOLE_WITHIN_S, "being started again")
            strike.noticed_s = time.perf_counter() - strike.at
        await poll(self._is_whole, WHOLE_WITHIN_S, "becoming whole again")
        strike.whole_s = time.perf_counter() - strike.at
        others = self._others.pop(id(strike))
        strike.bystanders = [i[:12] for i, before in others.items() if await _started(i) != before]

    async def close(self) -> None:
        """Nothing to close."""

    async def _drawn(self, service: str, draw: Random) -> str:
        compose_name = service.replace("_", "-")
        ids = await self._ids(compose_name)
        if not ids:
            raise BenchError(f"this project has no {compose_name} that could be killed")
        return draw.choice(sorted(ids))

    async def _ids(self, *service: str) -> list[str]:
        """Of a service's containers that run, or of all."""
        return (await asyncio.to_thread(_run, [*self._compose, "ps", "--quiet", *service])).split()

    async def _is_whole(self) -> bool:
        told = await asyncio.to_thread(_run, [*self._compose, "ps", "--all", "--format", "json"])
        rows = [json.loads(line) for line in told.splitlines() if line.strip()]
        rows = [row for entry in rows for row in (entry if isinstance(entry, list) else [entry])]
        return bool(rows) and all(
            row["State"] == "running" and row.get("Health", "") in ("", "healthy") for row in rows
        )


async def _started(container: str) -> str:
    return await _docker("inspect", "--format", "{{.State.StartedAt}}", container)


async def _are_new(hit: Mapping[str, str]) -> bool:
    """Whether each has been started since."""
    return all([await _started(container) != before for container, before in hit.items()])


async def _kill(container: str) -> None:
    """As a crash: a container that `docker kill` ended is not started again by Docker."""
    pid = int(await _docker("inspect", "--format", "{{.State.Pid}}", container))
    try:
        os.kill(pid, signal.SIGKILL)
    except (PermissionError, ProcessLookupError):  # not root, or Docker is not on this machine
        await _docker("kill", container)
        await _docker("start", container)


async def _docker(*words: str) -> str:
    return await asyncio.to_thread(_run, ["docker", *words])


def _run(command: list[str]) -> str:
    """What it prints. Raises BenchError."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{' '.join(command[:3])}: {error}") from None
    if result.returncode:
        raise BenchError(f"{' '.join(command)}: {result.stderr.strip()[-500:]}")
    return result.stdout
