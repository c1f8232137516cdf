"""What services that make artifacts have in common, from the bound address to the end."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis

from shared.artifacts.neighbours import Neighbours
from shared.artifacts.store import SERVICE_NAME, ArtifactServicer, ArtifactStore, remove_abandoned
from shared.net.channels import MAX_MESSAGE_BYTES
from shared.net.rpc.server import RpcServer
from shared.queue import connect
from shared.queue.keys import Keys, new_instance_id
from shared.queue.registry import Announcement, Load
from shared.served_part import ServedPart
from shared.settings import ServiceSettings
from tessera.artifact.v1 import artifact_pb2_grpc

log = structlog.get_logger(__name__)

_MAX_CONNECTION_AGE_S = 30.0


@dataclass(frozen=True)
class Producer:
    """`resources` are closed after the server: calls under way finish before what they use is closed."""

    server: RpcServer
    redis: Redis
    store: ArtifactStore
    resources: AsyncExitStack
    keys: Keys
    instance_id: str

    @asynccontextmanager
    async def serving(
        self, service: str, part: ServedPart, load: Callable[[], Load], numerics: str = ""
    ) -> AsyncIterator[None]:
        """Serves the artifacts and what was added to the server, in the registry as `service` of these numerics, until
        the block ends; there it says what its `load` is."""
        register = artifact_pb2_grpc.add_ArtifactServiceServicer_to_server
        self.server.add(SERVICE_NAME, register, ArtifactServicer(self.store))
        await self.server.ready()
        address = self.server.address
        announcement = Announcement(
            self.redis,
            self.keys,
            service,
            self.instance_id,
            address,
            part.to_json(),
            numerics=numerics,
            load=load,
        )
        async with announcement:
            yield
        log.info("draining")
        await self.server.not_ready()


@asynccontextmanager
async def open_producer(
    settings: ServiceSettings, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[Producer]:
    """Binds, and makes a store of its own. Raises ServingError if the address is taken."""
    server = RpcServer(
        settings.listen,
        advertise=settings.advertise,
        redis_url=settings.redis_url,
        heartbeat=settings.heartbeat,
        max_message_bytes=max_message_bytes,
        max_connection_age_s=_MAX_CONNECTION_AGE_S,
    )
    async with AsyncExitStack() as resources, server:
        log.info("loading", model=str(settings.model), address=server.address)
        redis = connect(settings.queue_url)
        resources.push_async_callback(redis.aclose)
        instance_id = new_instance_id()
        remove_abandoned(settings.artifact_dir)
        store = ArtifactStore(settings.artifact_dir, instance_id, server.address)
        resources.callback(store.close)
        neighbours = Neighbours(settings.artifact_dir, settings.artifact_dir / instance_id)
        resources.push_async_callback(neighbours.close)
        store.space.ask = neighbours.make_room
        keys = Keys(settings.model_name)
        yield Producer(server, redis, store, resources, keys, instance_id)
