"""What is running, and what it does: by the registry, and by the load that services and schedulers publish."""

from typing import Any

from services.gateway.redis_calls import within
from services.gateway.telemetry.recent_errors import RecentErrors
from shared.queue import Queue
from shared.queue.stores.error_store import ErrorStore, KeptError
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad

SERVICES = ("gateway", "preprocess", "vision_encoder", "scheduler", "decoder")
_REDIS_S = 3.0


class SystemState:
    """Reads it from Redis."""

    def __init__(self, queue: Queue, errors: RecentErrors, error_store: ErrorStore) -> None:
        """`errors` are this gateway's own, which are written before all are read."""
        self._queue = queue
        self._errors = errors
        self._error_store = error_store

    async def now(self) -> dict[str, Any]:
        """All of it as JSON has it. Raises Unavailable while Redis is away."""
        return await within(self._read(), _REDIS_S)

    async def _read(self) -> dict[str, Any]:
        loads, (live, live_tokens) = await self._queue.loads(), await self._queue.depth()
        services = [await self._service(service) for service in SERVICES]
        await self._errors.flush(self._error_store)
        now_s, errors = await self._error_store.read()
        decoders = [
            {"scheduler": load.scheduler_id, **_decoder(decoder)}
            for load in loads
            for decoder in load.decoders
        ]
        running = sum(decoder["running"] for decoder in decoders)
        return {
            "now_unix_s": now_s,
            "services": services,
            "decoders": decoders,
            "queue": {
                "live": live,
                "live_tokens": live_tokens,
                "running": running,
                "waiting": max(0, live - running),
            },
            "errors": [_error(error) for error in errors],
        }

    async def _service(self, service: str) -> dict[str, Any]:
        members, loads = (
            await self._queue.members(service),
            await self._queue.service_loads(service),
        )
        replicas = [
            {
                "id": one.instance_id,
                "address": one.address,
                "numerics": one.numerics,
                "load": loads.get(one.instance_id),
            }
            for one in sorted(members, key=lambda one: (one.address, one.instance_id))
        ]
        return {"service": service, "replicas": replicas}


def _error(error: KeptError) -> dict[str, Any]:
    content = {name: value for name, value in error.content.items() if name != "number"}
    return {"at_unix_s": error.at_ms / 1000, **content}


def _decoder(load: DecoderLoad) -> dict[str, Any]:
    totals = load.totals
    return {
        "id": load.decoder_id,
        "address": load.address,
        "running": load.running,
        "waiting": load.waiting,
        "waiting_for_media": load.waiting_for_media,
        "kv_blocks_used": load.blocks_used,
        "kv_blocks_total": load.blocks_total,
        "block_size": load.block_size,
        "preemptions": load.preemptions,
        "prefix_queries": load.prefix_queries,
        "prefix_hits": load.prefix_hits,
        "adapters": list(load.running_adapters),
        # Sums since the lease, in microseconds; a reader who comes again divides differences.
        "steps": {
            "steps": totals.steps,
            "tokens": totals.tokens,
            "step_us": totals.step_us,
            "plan_us": totals.plan_us,
            "transfer_us": totals.transfer_us,
            "prepare_us": totals.prepare_us,
            "forward_us": totals.forward_us,
            "sample_us": totals.sample_us,
            "predicted_us": load.step_predicted_us,
            "target_us": load.step_target_us,
        },
    }
