"""The run: first undisturbed, then the same requests again with a kill in each of as many rounds."""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.kill.requests import PATH, Request, calling, draw_requests, shares
from benchmarks.kill.settings import KillSettings
from benchmarks.kill.target import POLL_S, Strike, Target
from benchmarks.kill.transcript import Choice, Transcript
from benchmarks.kill.victims import Victim, order_of_kills
from benchmarks.load.errors import BenchError
from shared.client import Client, ClientError, Refused

_SPREAD = 0.5  # of a round's time: over so much of it its requests come


@dataclass
class Outcome:
    """Everything of one run; `reference[i]` and `disturbed[i]` are of the same request."""

    requests: list[Request]
    reference: list[Transcript] = field(default_factory=list)
    disturbed: list[Transcript] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    reconnects: int = 0
    seconds: float = 0.0  # of the disturbed part


class KillRun:
    """One measurement on a live system."""

    def __init__(self, settings: KillSettings, target: Target) -> None:
        self._settings = settings
        self._target = target
        urls = settings.urls or target.urls
        # A client for each gateway to begin with: all of them have streams when one is killed.
        self._clients = [
            Client(
                [*urls[number:], *urls[:number]],
                api_key=settings.api_key,
                patience_s=settings.patience,
                tls=settings.tls(),
            )
            for number in range(len(urls))
        ]
        self.running: list[Transcript] = []  # streams that are being read

    async def run(self) -> Outcome:
        """Raises BenchError if the system cannot be asked, fails undisturbed, or does not become whole again."""
        settings = self._settings
        model = await self._model()
        calls = settings.calling > 0 and await self._calls_tools(model)
        outcome = Outcome(draw_requests(settings, model, calls=calls))
        kills = order_of_kills(settings.plan_of_victims, settings.times, settings.seed)
        if len(kills) > len(outcome.requests):
            raise BenchError(f"{len(kills)} kills need at least as many --num-requests")
        rounds = shares(outcome.requests, len(kills))
        await self._warm_up(outcome.requests)
        times = []
        for share in rounds:
            began = time.perf_counter()
            outcome.reference += await self._round(share, 0.0, began)
            times.append(time.perf_counter() - began)
        failed = [t for t in outcome.reference if t.error or t.lost or t.doubled]
        if failed:
            raise BenchError(f"a request failed before anybody was killed: {failed[0].error}")
        round_s = sorted(times)[len(times) // 2]
        _say(f"{len(rounds)} rounds without kills, {round_s:.2f} s each; now with kills")
        before = sum(client.reconnects for client in self._clients)
        began = time.perf_counter()
        await self._disturbed(outcome, kills, rounds, round_s)
        outcome.seconds = time.perf_counter() - began
        outcome.reconnects = sum(client.reconnects for client in self._clients) - before
        return outcome

    async def close(self) -> None:
        """Ends connections."""
        for client in self._clients:
            client.close()
        await self._target.close()

    async def _model(self) -> str:
        try:
            return str((await self._clients[0].get("/v1/models"))["data"][0]["id"])
        except (ClientError, LookupError, TypeError) as error:
            raise BenchError(f"no model is served: {error}") from None

    async def _calls_tools(self, model: str) -> bool:
        """Whether it is known how the model writes calls. Raises BenchError for what else is wrong."""
        turn = {"role": "user", "content": "Paint."}
        body = {"model": model, "messages": [turn], "max_tokens": 1, **calling(1)}
        try:
            async for _ in self._clients[0].stream(PATH, body):
                pass
        except Refused as error:
            if "--tool-call-parser" not in error.reason:
                raise BenchError(f"a tool cannot be called: {error}") from None
            _say("no request has to call a tool: how this model writes calls is not known")
            return False
        except ClientError as error:
            raise BenchError(f"a tool cannot be called: {error}") from None
        return True

    async def _warm_up(self, requests: Sequence[Request]) -> None:
        """Whatever is made at first use is made now."""
        await asyncio.gather(*(self.ask(n, r) for n, r in enumerate(requests[:4])))

    async def _disturbed(
        self,
        outcome: Outcome,
        kills: Sequence[Victim],
        rounds: Sequence[Sequence[Request]],
        round_s: float,
    ) -> None:
        """A round begins when the system is whole and the last one's streams go on; they may still run."""
        draw = random.Random(f"{self._settings.seed}/moments")
        under_way: list[asyncio.Task[list[Transcript]]] = []
        try:
            for number, (victim, share) in enumerate(zip(kills, rounds, strict=True), start=1):
                spread = _SPREAD * round_s
                under_way.append(
                    asyncio.create_task(self._round(share, spread, time.perf_counter()))
                )
                await asyncio.sleep(victim.moment(draw, round_s))
                strike = await self._target.strike(victim, draw)
                hit = [t for t in self.running if t.times]
                await self._target.follow(strike, self._settings.freeze_s)
                await _gone_on(hit, self._settings.patience)
                outcome.strikes.append(strike)
                _say(
                    f"{number:>3}/{len(kills)} {victim.text} ({', '.join(strike.hit)}): "
                    f"whole after {strike.whole_s or 0:.2f} s"
                )
            for transcripts in await asyncio.gather(*under_way):
                outcome.disturbed += transcripts
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _round(
        self, share: Sequence[Request], spread_s: float, began: float
    ) -> list[Transcript]:
        """Sends its requests over `spread_s` and reads all to their ends."""

        async def one(number: int, request: Request) -> Transcript:
            await asyncio.sleep(max(0.0, began + spread_s * request.at - time.perf_counter()))
            return await self.ask(number, request)

        return list(await asyncio.gather(*(one(n, r) for n, r in enumerate(share))))

    async def ask(self, number: int, request: Request) -> Transcript:
        """Reads one answer to its end, by the client of that number."""
        client = self._clients[number % len(self._clients)]
        choices = [Choice() for _ in range(request.choices)]
        transcript = Transcript(time.perf_counter(), choices)
        self.running.append(transcript)
        try:
            async for event in client.stream(PATH, request.body):
                transcript.take(event)
        except ClientError as error:
            transcript.error = f"{type(error).__name__}: {error}"
        transcript.end(time.perf_counter())
        self.running.remove(transcript)
        return transcript


async def _gone_on(hit: Sequence[Transcript], within_s: float) -> None:
    """Waits until every stream that a kill has hit has a token again, so that each gap is due to one kill."""
    whole = time.perf_counter()
    while any(not t.ended and t.times[-1] < whole for t in hit):
        if time.perf_counter() - whole > within_s:
            return  # its long gap is in the result
        await asyncio.sleep(POLL_S)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
