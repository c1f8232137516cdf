"""Exports the traces of requests that have ended: their timelines as spans, over OTLP.

One gateway takes each request's trace, whichever it is, by a script; so it is exported once, whoever was killed before.
A gateway that is killed between taking a trace and sending it costs this trace.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from services.gateway.telemetry.traces.request_timeline import timeline_of
from services.gateway.telemetry.traces.sampling import Sampler, never_sampled, sampler_of
from shared.errors import InvalidRequest, Unavailable
from shared.net import supervise
from shared.net.backoff import Backoff
from shared.net.supervise import Background
from shared.queue.stores.timeline_store import TimelineStore
from shared.settings import trace_settings
from shared.telemetry.trace_settings import TraceSettings

log = structlog.get_logger(__name__)

_PROTOCOLS = ("grpc", "http/protobuf")
_LOOK_S = 1.0
_AT_ONCE = 64
_TRIES = 4
_BACKOFF = Backoff(first_s=0.5, longest_s=4.0)
_EXTRA = "pip install -c constraints.txt -e '.[otel]'"


@contextlib.asynccontextmanager
async def exporting_traces(store: TimelineStore) -> AsyncIterator[Sampler]:
    """Inside of it traces are exported, if the environment says where to; which ones, the sampler says. What cannot be
    exported is logged, and costs no request.
    """
    sampler, exporter = _made(store, trace_settings())
    work = Background("trace export", exporter.run) if exporter is not None else None
    try:
        yield sampler
    finally:
        await supervise.end(work)
        if exporter is not None:
            await exporter.close()


def _made(
    store: TimelineStore, settings: TraceSettings | None
) -> "tuple[Sampler, TraceExporter | None]":
    if settings is None:
        return never_sampled, None
    try:
        sampler = sampler_of(settings.sampler, settings.sampler_argument)
        exporter = TraceExporter(store, settings)
    except InvalidRequest as error:
        log.error("traces are not exported", error=error.message)
    except ModuleNotFoundError as error:
        why = f"the Python package of {error.name} is missing: {_EXTRA}"
        log.error("traces are not exported", error=why)
    else:
        log.info("traces are exported", to=settings.endpoint, protocol=settings.protocol)
        return sampler, exporter
    return never_sampled, None


class TraceExporter:
    """Looks once a second for traces that are due, of all gateways' requests."""

    def __init__(self, store: TimelineStore, settings: TraceSettings) -> None:
        """Raises ModuleNotFoundError where the extra `otel` is not installed, InvalidRequest."""
        if settings.protocol not in _PROTOCOLS:
            raise InvalidRequest(
                "BAD_PROTOCOL",
                f"OTEL_EXPORTER_OTLP_PROTOCOL is {settings.protocol!r}, not {' or '.join(_PROTOCOLS)}",
            )
        from services.gateway.telemetry.traces import otlp  # needs the extra, which others lack

        self._store = store
        self._settings = settings
        self._otlp = otlp
        self._sender = otlp.OtlpSender(settings)

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(Unavailable):
                while due := await self._store.due_traces(_AT_ONCE):
                    await self._export(due)

    async def close(self) -> None:
        """Ends the connection to the collector."""
        await self._sender.close()

    async def _export(self, request_ids: list[str]) -> None:
        found = []
        for request_id in request_ids:
            kept = await self._store.read(request_id)
            if kept is not None:
                found.append((kept.head, timeline_of(request_id, kept)))
        request = self._otlp.request_of(self._settings, found)
        for number in range(_TRIES):
            try:
                await self._sender.send(request)
                return
            except (
                Exception
            ) as error:  # of gRPC or HTTP: whatever it is, it must not end the others
                if number == _TRIES - 1:
                    why = f"{type(error).__name__}: {error}"[:300]
                    log.warning("traces were not exported", traces=len(found), error=why)
                else:
                    await asyncio.sleep(_BACKOFF.pause_s(number))
