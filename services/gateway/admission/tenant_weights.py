"""The weights by which tenants share the decoders when more requests wait than can be served."""

import asyncio
from typing import Self

import structlog

from services.gateway.admission.caller import Caller, tenant_of
from shared.errors import InvalidRequest, Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue import Queue

log = structlog.get_logger(__name__)

_RETRY_S = 1.0
_KINDS = ("key", "user")


def read_weights(text: str) -> dict[str, float]:
    """Tenants and their weights, from `key:<API key>=4,user:<name>=0.5`.

    Raises InvalidRequest for anything else.
    """
    weights = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.rpartition("=")
        kind, _, owner = name.partition(":")
        weight = _number(number)
        if kind not in _KINDS or not owner or not weight:
            # The part may hold a key: it is not repeated.
            raise InvalidRequest(
                "BAD_TENANT_WEIGHTS",
                "tenant_weights: each is key:<API key>=<weight> or user:<name>=<weight>, a number above 0, with "
                "commas between",
                field="tenant_weights",
            )
        caller = Caller("", api_key=owner if kind == "key" else "")
        weights[tenant_of(caller, owner)] = weight
    return weights


def _number(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0 < weight < float("inf") else 0.0


class TenantWeights:
    """Writes this gateway's weights to Redis, and again whenever Redis has lost its last writes.

    `async with` begins. All gateways of a model are to be started with the same.
    """

    def __init__(self, queue: Queue, weights: dict[str, float]) -> None:
        self._queue = queue
        self._weights = weights
        self._work: list[Background] = []

    async def __aenter__(self) -> Self:
        if self._weights:
            self._work = [
                Background("tenant weights", self._write),
                Background("tenant weights after recovery", self._recover),
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(*self._work)

    async def _write(self) -> None:
        while True:
            try:
                await self._queue.set_weights(self._weights)
                return
            except Unavailable as error:
                log.debug("tenant weights not written yet", error=error.message)
            await asyncio.sleep(_RETRY_S)

    async def _recover(self) -> None:
        async for _ in self._queue.recoveries():
            await self._write()
