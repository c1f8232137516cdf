"""A client of the gRPC door: asks, reads, comes back when it was cut off, leaves when it likes, and knows the text that
it must get.
"""

import asyncio
import random
from typing import TYPE_CHECKING, Any

import grpc.aio

from shared.rpc import channel
from tests.simulation.arithmetic import MODEL
from tests.simulation.virtual_loop import Process
from tessera.common.v1.ending_pb2 import FinishReason
from tessera.gateway.v1.chat_pb2 import ChatEvent, CompleteRequest, GenerationOptions, TokenIds
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub

if TYPE_CHECKING:
    from tests.simulation.world import World

_PREFIX = [7, 21, 14, 93, 5, 60, 77, 12, 31, 8, 44, 150, 19, 2, 88, 101]
_AGAIN_S = 0.3
_PATIENCE_S = 90.0


class Client:
    """One request and all attempts at it."""

    def __init__(self, world: "World", number: int, rng: random.Random) -> None:
        self.name = f"client-{number}"
        self.state = "not begun"
        self.done = False
        self._world = world
        self._rng = rng
        self._process = Process(self.name)
        self._begins = rng.uniform(0.3, 4.0)
        shared = rng.choice([0, 8, 16])
        own = [rng.randrange(1, MODEL.vocabulary) for _ in range(rng.randint(1, 12))]
        self.prompt = _PREFIX[:shared] + own
        self.max_tokens = rng.choice([1, 3, 10, 25, 60])
        self.n = rng.choice([1, 1, 1, 2, 3])
        self.ignore_eos = rng.random() < 0.3
        self.leaves_after = rng.uniform(0.05, 2.0) if rng.random() < 0.15 else None
        self.user = rng.choice(["", "ann", "bob"])
        stops = not self.ignore_eos
        self.expected = [
            MODEL.generate(self.prompt, choice, self.max_tokens, stops) for choice in range(self.n)
        ]
        self.tokens: list[list[int]] = [[] for _ in range(self.n)]
        self.finished: list[bool] = [False] * self.n
        self.request_id = ""
        self.event_id = ""

    def start(self) -> None:
        """Comes when its time has come."""
        self._world.loop.spawn(self._process, self._live())

    async def _live(self) -> None:
        await asyncio.sleep(self._begins)
        world = self._world
        deadline = world.loop.now + _PATIENCE_S
        asking = asyncio.create_task(self._ask(deadline))
        if self.leaves_after is None:
            await asking
        else:
            await asyncio.wait({asking}, timeout=self.leaves_after)
            if not asking.done():
                world.trace(f"{self.name} leaves")
                asking.cancel()
                await asyncio.wait({asking})
                self.state = "left"
        self.done = True
        world.trace(f"{self.name} is done: {self.state}")

    async def _ask(self, deadline: float) -> None:
        while self._world.loop.now < deadline:
            gateways = [room for room in self._world.rooms if room.name.startswith("gateway")]
            address = f"{self._rng.choice(gateways).name}:1"
            self.state = f"asks {address}"
            async with channel(address) as line:
                try:
                    async for event in self._call(ChatServiceStub(line)):
                        self._hear(event)
                    self._check_end()
                    return
                except grpc.aio.AioRpcError as error:
                    if not self._may_fail(error):
                        return
            await asyncio.sleep(_AGAIN_S)
        self._world.broken(f"{self.name} was never served")

    def _call(self, stub: Any) -> Any:
        options = GenerationOptions(
            max_tokens=self.max_tokens,
            n=self.n,
            ignore_eos=self.ignore_eos,
            return_token_ids=True,
            user=self.user,
            temperature=1.0,
            seed=1,
        )
        prompt = TokenIds(ids=self.prompt)
        return stub.Complete(CompleteRequest(token_ids=prompt, options=options))

    def _hear(self, event: ChatEvent) -> None:
        self.event_id = event.event_id
        match event.WhichOneof("event"):
            case "accepted":
                self.request_id = event.accepted.request_id
                self._world.trace(f"{self.name} is accepted as {self.request_id}")
            case "delta":
                self._take(event.delta.choice, list(event.delta.token_ids))
            case "finished":
                self._finish(event.finished.choice, event.finished.reason)

    def _take(self, choice: int, tokens: list[int]) -> None:
        have, want = self.tokens[choice], self.expected[choice]
        if self.finished[choice]:
            self._world.broken(f"{self.name}: tokens after the end of choice {choice}")
        if want[len(have) : len(have) + len(tokens)] != tokens:
            self._world.broken(
                f"{self.name} ({self.request_id}) choice {choice}: {tokens} after {len(have)} tokens;"
                f" an undisturbed run goes on with {want[len(have) : len(have) + 5]}"
            )
        have += tokens

    def _finish(self, choice: int, reason: int) -> None:
        have, want = self.tokens[choice], self.expected[choice]
        if self.finished[choice]:
            self._world.broken(f"{self.name}: choice {choice} ended twice")
        self.finished[choice] = True
        if have != want:
            self._world.broken(
                f"{self.name}: choice {choice} ended with {len(have)} of {len(want)} tokens"
            )
        stops = not self.ignore_eos and want[-1] == MODEL.stop_token
        right = FinishReason.FINISH_REASON_STOP if stops else FinishReason.FINISH_REASON_LENGTH
        if reason != right:
            self._world.broken(f"{self.name}: choice {choice} ended for the reason {reason}")

    def _check_end(self) -> None:
        self.state = "served"
        if not all(self.finished):
            self._world.broken(f"{self.name}: the stream ended before its choices did")

    def _may_fail(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether to try again."""
        world = self._world
        world.trace(f"{self.name} fails: {error.code().name} {error.details()}")
        self.state = f"{error.code().name}: {error.details()}"
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            world.broken(f"{self.name} ({self.request_id}) was told {self.state}")
            return False
        if self.request_id:  # accepted, and its gateway has died: a plain client cannot come back
            return False
        return True
