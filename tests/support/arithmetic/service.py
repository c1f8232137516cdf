"""The arithmetic decoder behind the step stream, over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from services.decoder.worker.plans.plan import Limits, read_plan
from shared.errors import Precondition, Superseded, Unavailable
from shared.queue.keys import new_instance_id
from tessera.decoder.v1 import decoder_pb2
from tessera.decoder.v1.decoder_pb2_grpc import DecoderServiceServicer
from tests.support.arithmetic.model import BLOCK_SIZE, rounding
from tests.support.arithmetic.worker import ArithmeticWorker

_LIMITS = Limits(
    num_blocks=200,
    num_host_blocks=0,
    max_slots=16,
    max_model_len=256,
    max_batched_tokens=64,
    max_step_tokens=64,
    block_size=BLOCK_SIZE,
)


class ArithmeticDecoder(DecoderServiceServicer):
    """Answers plans, each after `delay_s`; `broken` lists what they did wrong. What it computes depends on the names of
    blocks, and these on `content`, its weights. How it
    rounds depends on `numerics`, such as "name-3".
    """

    fingerprint = b"f" * 16  # of all that are one model

    def __init__(self, delay_s: float = 0.0, content: bytes = b"", numerics: str = "") -> None:
        self.numerics = numerics
        self.row_invariant = True
        self.id = new_instance_id()
        self.content = content
        self.delay_s = delay_s
        self.largest_lease = 0
        self.broken: list[str] = []
        self.stalled = asyncio.Event()
        self.draining = False
        self.plans_since_draining = 0  # that came after a heartbeat which said so had left
        self.num_plans = 0  # that came
        self.num_computed = 0  # tokens that rows were made of
        self.met: set[str] = set()  # requests that were ever introduced
        self._worker = ArithmeticWorker(_LIMITS, self.broken.append, model=rounding(numerics))

    @property
    def slots(self) -> dict[int, list[int]]:
        """The tokens of each sequence."""
        return self._worker.histories

    async def Steps(self, requests: Any, context: Any) -> AsyncIterator[decoder_pb2.StepsResponse]:
        """One stream."""
        first = await anext(aiter(requests))
        if first.open.decoder_id != self.id:
            raise Precondition("WRONG_DECODER", f"this is decoder {self.id}")
        if first.open.lease <= self.largest_lease:
            raise Precondition("STALE_LEASE", f"lease {self.largest_lease} has it")
        if self.draining:
            raise Unavailable("DECODER_STOPS", "it was told to stop")
        self.largest_lease = first.open.lease
        self._worker.reset()
        said_draining = False
        yield decoder_pb2.StepsResponse(
            hello=decoder_pb2.Hello(
                decoder_id=self.id,
                model_fingerprint=self.fingerprint,
                block_size=_LIMITS.block_size,
                num_blocks=_LIMITS.num_blocks,
                max_slots=_LIMITS.max_slots,
                max_model_len=_LIMITS.max_model_len,
                max_batched_tokens=_LIMITS.max_batched_tokens,
                plans_in_flight=2,
                content=self.content,
                numerics=self.numerics,
                row_invariant=self.row_invariant,
            )
        )
        async for request in requests:
            if request.WhichOneof("message") == "heartbeat":
                said_draining = self.draining
                yield decoder_pb2.StepsResponse(
                    heartbeat=decoder_pb2.Heartbeat(draining=said_draining)
                )
                continue
            self.plans_since_draining += said_draining
            self.num_plans += 1
            if self.stalled.is_set():
                await asyncio.sleep(3600)
            await asyncio.sleep(self.delay_s)
            if first.open.lease < self.largest_lease:
                # As the real one: a plan of an older lease changes nothing any more.
                raise Superseded("NEWER_LEASE", f"lease {self.largest_lease} took over")
            yield decoder_pb2.StepsResponse(result=self.step(request.plan))

    def step(self, message: decoder_pb2.StepPlan) -> decoder_pb2.StepResult:
        """The answer to a plan."""
        plan = read_plan(message, _LIMITS)
        self.met |= {new.request_id for new in plan.new}
        self.num_computed += int(plan.row_count.sum())
        return self._worker.run(plan)
