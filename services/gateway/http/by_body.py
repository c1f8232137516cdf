"""Routes that several APIs have at one method and path: the body says whose it is."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from services.gateway.admission.caller import Caller
from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.http.endpoint import Endpoint, Route
from services.gateway.http.exchange import BodyLimits, Exchange


class Mounted(NamedTuple):
    """A route, and the API that it belongs to."""

    endpoint: Endpoint
    route: Route


class ByBody:
    """Hands a request to the API whose field (`Route.known_by`) its body has."""

    def __init__(self, candidates: Sequence[Mounted], limits: BodyLimits) -> None:
        """The first one's form is that of errors until it is known. Raises ValueError for a route without a field."""
        fields = [route.known_by for _, route in candidates]
        if not all(fields):
            raise ValueError(f"several APIs have {candidates[0].route.path}, not all with known_by")
        self._candidates = dict(zip(fields, candidates, strict=True))
        raw = msgspec.Raw()
        self._kind = msgspec.defstruct("Fields", [(name, msgspec.Raw, raw) for name in fields])
        self._limits = limits

    async def handle(self, exchange: Exchange, caller: Caller) -> None:
        """Reads the body, and lets the API that it is for read it again. Raises InvalidRequest for a body of none."""
        body = await exchange.peek_json(self._limits)
        found = await off_loop(partial(decode, kind=self._kind), body)
        del body
        for name, candidate in self._candidates.items():
            if bytes(getattr(found, name)):
                exchange.form = candidate.endpoint
                await candidate.route.handler(exchange, caller)
                return
        names = " or ".join(f"`{name}`" for name in self._candidates)
        raise wrong(next(iter(self._candidates)), f"is missing: a body here has {names}")
