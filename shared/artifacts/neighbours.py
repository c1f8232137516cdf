"""Calls to the other producers whose artifacts are in the same folder."""

import os
from pathlib import Path

import structlog

from shared.artifacts.space import LOCK
from shared.artifacts.store import remove_abandoned
from shared.errors import ServingError
from shared.net import tasks
from shared.net.channels import Channels
from shared.net.rpc.errors import calling
from tessera.artifact.v1 import artifact_pb2_grpc
from tessera.artifact.v1.artifact_pb2 import MakeRoomRequest

log = structlog.get_logger(__name__)

_TIMEOUT_S = 2.0
_LONGEST_ADDRESS = 4096  # bytes


class Neighbours:
    """The producers in `root` but for `own`, the folder of this one."""

    def __init__(self, root: Path, own: Path) -> None:
        self._root = root
        self._own = own
        self._channels = Channels()

    async def make_room(self, size: int) -> None:
        """Has each of them evict what nobody needs, up to `size` bytes, and removes what the dead have left.

        One that does not answer is passed over.
        """
        remove_abandoned(self._root)
        await tasks.together([self._ask(address, size) for address in self._addresses()])

    async def close(self) -> None:
        """Closes the channels."""
        await self._channels.close()

    async def _ask(self, address: str, size: int) -> None:
        try:
            with self._channels.use(address) as channel, calling(f"artifact producer {address}"):
                stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
                await stub.MakeRoom(MakeRoomRequest(size_bytes=size), timeout=_TIMEOUT_S)
        except ServingError as error:
            log.debug("a producer made no room", address=address, error=error.message)

    def _addresses(self) -> list[str]:
        """As they stand in the locks of their folders; those of other users are not trusted with calls."""
        found = []
        for folder in self._root.iterdir():
            try:
                lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue  # no producer's, or being removed
            try:
                ours = os.fstat(lock).st_uid == os.getuid() and folder != self._own
                address = os.read(lock, _LONGEST_ADDRESS).decode("utf-8", "replace") if ours else ""
            finally:
                os.close(lock)
            if address:
                found.append(address)
        return found
