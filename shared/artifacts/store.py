"""Artifacts: immutable tensors that travel beside the messages that name them.

A producer owns an `ArtifactStore`: a folder of files in shared memory. A consumer opens an
`ArtifactRef` with an `ArtifactReader`, which maps the file where it can ("same host" is a fact that
is tried) and fetches the bytes by gRPC where it cannot. A mapping outlives the file and the
producer. The owner decides which artifact is evicted when.
"""

import fcntl
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import structlog

from shared.artifacts import file as artifact_file
from shared.artifacts.file import Array, TornFile
from shared.artifacts.space import LOCK, PATIENCE_S, ArtifactSpace, out_of_space
from shared.environment import random_bytes, random_hex, unix_time
from shared.errors import NotFound, Unavailable
from shared.net.channels import Channels
from shared.net.rpc.errors import calling
from tessera.artifact.v1 import artifact_pb2_grpc
from tessera.artifact.v1.artifact_pb2 import (
    ArtifactLocation,
    ArtifactRef,
    FetchArtifactRequest,
    FetchArtifactResponse,
    MakeRoomRequest,
    MakeRoomResponse,
)

log = structlog.get_logger(__name__)

SERVICE_NAME = "tessera.artifact.v1.ArtifactService"
PIECE_BYTES = 1 << 20

_UNFINISHED = ".new"
_MAX_BYTES = 4 << 30  # of an artifact that is fetched: a wrong size must not take all memory
_TIMEOUT_S = 30.0  # for fetching one
_UNFINISHED_AGE_S = 60.0  # a folder that is being made is older than this only if its maker died


@dataclass(frozen=True)
class Reservation:
    """A path where another process may write an artifact (`artifact_file.write`) that `adopt` then adds."""

    path: Path
    nonce: bytes
    digest: bytes
    space: ArtifactSpace = field(compare=False, repr=False)

    def create(self) -> int:
        """The new, empty file, open for writing. Raises Overloaded, Unavailable."""
        try:
            return artifact_file.create(self.path)
        except OSError as error:
            raise out_of_space(error, self.path) from error

    async def allocate(self, payload_bytes: int) -> None:
        """A new file with memory for so many bytes of payload. Raises what `ArtifactSpace.allocate` does."""
        descriptor = self.create()
        try:
            await self.space.allocate(descriptor, payload_bytes, self.path)
        finally:
            os.close(descriptor)


class ArtifactStore:
    """The artifacts of one process, in `<root>/<instance_id>/<digest in hex>`; `address` is its gRPC target.

    The folder is locked for as long as the process lives, so that `remove_abandoned` can tell a
    dead one.
    """

    def __init__(
        self, root: Path, instance_id: str, address: str, patience_s: float = PATIENCE_S
    ) -> None:
        """An artifact waits `patience_s` for its memory."""
        self._folder = root / instance_id
        self._address = address
        self._nonce = random_bytes(artifact_file.NONCE_BYTES)
        self._refs: dict[bytes, ArtifactRef] = {}
        self.space = ArtifactSpace(root, patience_s)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Locked before it gets its name: a named folder without a holder is always abandoned.
        unfinished = root / (instance_id + _UNFINISHED)
        unfinished.mkdir(mode=0o700)
        self._lock = os.open(unfinished / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            os.write(self._lock, address.encode())
        except OSError as error:  # full: the others cannot ask this one for room
            log.warning("shared memory is full at the start", folder=str(root), error=str(error))
        unfinished.rename(self._folder)

    def put(self, digest: bytes, array: Array, dtype: str | None = None) -> ArtifactRef:
        """Stores a tensor; `dtype="bfloat16"` names the type of uint16 elements. An existing artifact stays.

        Raises Overloaded when shared memory is full.
        """
        there = self.get(digest)
        if there is not None:
            return there
        place = self.reserve(digest)
        try:
            artifact_file.write(place.path, place.nonce, digest, array, dtype)
        except OSError as error:
            raise out_of_space(error, place.path) from error
        return self.adopt(place)

    def reserve(self, digest: bytes) -> Reservation:
        """A fresh path and what to write into the header, for a process that makes the artifact on our behalf."""
        name = f"{digest.hex()}.{random_hex(4)}.tmp"
        return Reservation(self._folder / name, self._nonce, digest, self.space)

    def adopt(self, place: Reservation) -> ArtifactRef:
        """Adds a file that was written under a reservation. Raises Unavailable if it is not whole."""
        path = self._folder / place.digest.hex()
        try:
            dtype, shape = artifact_file.read_header(place.path, place.nonce, place.digest)
            place.path.rename(path)
        except (OSError, TornFile) as error:
            self.discard(place)
            raise Unavailable("ARTIFACT_TORN", f"an artifact was not written: {error}") from error
        size = int(np.prod(shape, dtype=np.int64)) * artifact_file.numpy_dtype(dtype).itemsize
        location = ArtifactLocation(path=str(path), nonce=self._nonce, address=self._address)
        ref = ArtifactRef(
            digest=place.digest, dtype=dtype, shape=shape, size_bytes=size, location=location
        )
        self._refs[place.digest] = ref
        return _copy(ref)

    def discard(self, place: Reservation) -> None:
        """Removes what was written under a reservation."""
        place.path.unlink(missing_ok=True)

    def get(self, digest: bytes) -> ArtifactRef | None:
        """The artifact, if it is here."""
        ref = self._refs.get(digest)
        return _copy(ref) if ref is not None else None

    def evict(self, digest: bytes) -> None:
        """Forgets an artifact. Consumers that have mapped it keep it; an unknown digest is ignored."""
        if self._refs.pop(digest, None) is not None:
            (self._folder / digest.hex()).unlink(missing_ok=True)

    def read(self, digest: bytes) -> Array | None:
        """The tensor itself, mapped read-only, if it is here."""
        ref = self._refs.get(digest)
        try:
            return _map(ref) if ref is not None else None
        except FileNotFoundError:  # shared memory was cleaned up
            return None

    def close(self) -> None:
        """Removes the folder with everything in it."""
        self._refs.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(root: Path) -> list[Path]:
    """Removes the folders of producers that died, and returns them. Folders in use and foreign ones stay."""
    removed: list[Path] = []
    try:
        folders = [entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except FileNotFoundError:
        return removed
    for folder in folders:
        if folder.name.endswith(_UNFINISHED) and _age_s(folder) < _UNFINISHED_AGE_S:
            continue
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # not a producer's, or being removed by another process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except BlockingIOError:
            pass  # alive
        finally:
            os.close(lock)
    return removed


class ArtifactServicer(artifact_pb2_grpc.ArtifactServiceServicer):
    """Streams the artifacts of one store to consumers on other hosts, and makes room for producers on this one."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    async def FetchArtifact(
        self, request: FetchArtifactRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[FetchArtifactResponse]:
        """Yields the payload in order. Raises NotFound when it was evicted."""
        array = self._store.read(request.digest)
        if array is None:
            raise NotFound("ARTIFACT_GONE", f"no artifact {request.digest.hex()} here any more")
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, data.nbytes, PIECE_BYTES):
            yield FetchArtifactResponse(data=bytes(data[start : start + PIECE_BYTES]))

    async def MakeRoom(
        self, request: MakeRoomRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> MakeRoomResponse:
        """Evicts what nobody needs."""
        self._store.space.make_room(request.size_bytes)
        return MakeRoomResponse()


class ArtifactReader:
    """Opens artifacts of other processes. Keeps channels to producers it has fetched from lately."""

    def __init__(self) -> None:
        self._channels = Channels()

    def try_open_local(self, ref: ArtifactRef) -> Array | None:
        """Maps the artifact read-only if its file is on this host; bfloat16 comes as uint16. None if it is not."""
        if not ref.location.path:
            return None
        try:
            return _map(ref)
        except (OSError, ValueError, TornFile):
            return None

    async def open(self, ref: ArtifactRef) -> Array:
        """The tensor, read-only: mapped, or fetched into one buffer; bfloat16 comes as uint16.

        Raises NotFound when the producer has evicted it and Unavailable when the producer cannot be
        reached: in both cases it can be made again.
        """
        local = self.try_open_local(ref)
        return local if local is not None else await self._fetch(ref)

    async def close(self) -> None:
        """Closes the channels. Arrays that were handed out stay valid."""
        await self._channels.close()

    async def _fetch(self, ref: ArtifactRef) -> Array:
        address = ref.location.address
        if not address:
            raise NotFound("ARTIFACT_GONE", f"artifact {ref.digest.hex()} is on no host we can ask")
        try:
            artifact_file.check_size(ref.dtype, ref.shape, ref.size_bytes)
        except TornFile as error:
            raise Unavailable("ARTIFACT_TORN", f"bad artifact reference: {error}") from error
        if ref.size_bytes > _MAX_BYTES:
            raise Unavailable(
                "ARTIFACT_TOO_LARGE",
                f"an artifact of {ref.size_bytes} bytes is over the limit of {_MAX_BYTES}",
            )
        buffer = np.empty(ref.size_bytes, np.uint8)
        with (
            self._channels.use(address) as channel,
            calling(f"artifact producer {address}"),
        ):
            stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
            call = stub.FetchArtifact(FetchArtifactRequest(digest=ref.digest), timeout=_TIMEOUT_S)
            filled = 0
            async for piece in call:
                end = filled + len(piece.data)
                if end > buffer.nbytes:
                    call.cancel()
                    break
                buffer[filled:end] = np.frombuffer(piece.data, np.uint8)
                filled = end
        if filled != buffer.nbytes:
            raise Unavailable(
                "ARTIFACT_TORN", f"{address} sent {filled} bytes of {buffer.nbytes} announced"
            )
        buffer.flags.writeable = False
        return buffer.view(artifact_file.numpy_dtype(ref.dtype)).reshape(tuple(ref.shape))


def _map(ref: ArtifactRef) -> Array:
    return artifact_file.map_payload(
        Path(ref.location.path), ref.location.nonce, ref.digest, ref.dtype, tuple(ref.shape)
    )


def _copy(ref: ArtifactRef) -> ArtifactRef:
    """Messages are mutable: callers get copies."""
    copy = ArtifactRef()
    copy.CopyFrom(ref)
    return copy


def _age_s(folder: Path) -> float:
    try:
        return unix_time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


__all__ = [
    "SERVICE_NAME",
    "ArtifactReader",
    "ArtifactServicer",
    "ArtifactStore",
    "Reservation",
    "remove_abandoned",
]
