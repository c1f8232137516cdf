"""Whose code runs each part of the model, by what the services say of themselves."""

import contextlib
from collections.abc import Mapping
from typing import Any

from services.gateway.redis_calls import within
from shared.errors import Unavailable
from shared.queue import Queue

# The part of the model that each service runs.
_PARTS = {"preprocess": "prompt", "vision_encoder": "encoder", "decoder": "decoder"}
_REDIS_S = 1.0


class ServedParts:
    """Reads them from the registry."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._last: Mapping[str, Mapping[str, Any]] = {}

    async def now(self) -> Mapping[str, Mapping[str, Any]]:
        """`ServedPart.content` by "prompt", "encoder" and "decoder"; while Redis is away, as it was read last."""
        with contextlib.suppress(Unavailable):
            said = await within(self._queue.parts(), _REDIS_S)
            self._last = {
                part: said[service] for service, part in _PARTS.items() if service in said
            }
        return self._last
