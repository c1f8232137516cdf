"""What is running, and what it does: by the registry and by the load that schedulers publish."""

from typing import Any

from services.gateway.redis_calls import within
from services.gateway.telemetry.recent_errors import recent_errors
from shared.environment import unix_time
from shared.queue import Queue
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad

SERVICES = ("gateway", "preprocess", "vision_encoder", "scheduler", "decoder")
_REDIS_S = 3.0


class SystemState:
    """Reads it from Redis."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def now(self) -> dict[str, Any]:
        """All of it as JSON has it. Raises Unavailable while Redis is away."""
        return await within(self._read(), _REDIS_S)

    async def _read(self) -> dict[str, Any]:
        loads, (live, live_tokens) = await self._queue.loads(), await self._queue.depth()
        members = [await self._queue.members(service) for service in SERVICES]
        decoders = [
            {"scheduler": load.scheduler_id, **_decoder(decoder)}
            for load in loads
            for decoder in load.decoders
        ]
        running = sum(decoder["running"] for decoder in decoders)
        return {
            "now_unix_s": unix_time(),
            "services": [
                {
                    "service": service,
                    "replicas": [
                        {"id": one.instance_id, "address": one.address, "numerics": one.numerics}
                        for one in found
                    ],
                }
                for service, found in zip(SERVICES, members, strict=True)
            ],
            "decoders": decoders,
            "queue": {
                "live": live,
                "live_tokens": live_tokens,
                "running": running,
                "waiting": max(0, live - running),
            },
            "errors": [error._asdict() for error in recent_errors()],
        }


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
