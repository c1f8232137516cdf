"""Producers share a small file system: each keeps its share, and gives way to another's artifact."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from shared.settings import child_environment
from tests.support.processes.small_shared_memory import with_shared_memory

MIB = 1 << 20

# Two producers in /dev/shm, which has 8 MiB; each evicts its oldest artifact, but none of those that are needed.
PROGRAM = """
import asyncio, json, sys, tempfile
from pathlib import Path
import numpy as np
from shared.artifacts import file as artifact_file, neighbours, store as artifacts
from shared.errors import ServingError
from shared.net.rpc.server import RpcServer
from tessera.artifact.v1 import artifact_pb2_grpc

MIB = 1 << 20
ROOT = Path("/dev/shm/artifacts")

class Producer:
    def __init__(self, server, name):
        self.store = artifacts.ArtifactStore(ROOT, name, server.address, patience_s=0.5)
        self.neighbours = neighbours.Neighbours(ROOT, ROOT / name)
        self.store.space.ask = self.neighbours.make_room
        self.store.space.evict = self.evict
        self.kept, self.needed = [], set()
        server.add(artifacts.SERVICE_NAME, artifact_pb2_grpc.add_ArtifactServiceServicer_to_server,
                   artifacts.ArtifactServicer(self.store))

    def evict(self):
        for digest in self.kept:
            if digest not in self.needed:
                self.kept.remove(digest)
                size = self.store.get(digest).size_bytes
                self.store.evict(digest)
                return size
        return 0

    async def add(self, number, size, needed=False):
        digest = number.to_bytes(16, "big")
        place = self.store.reserve(digest)
        try:
            await place.allocate(size)
        except ServingError as error:
            self.store.discard(place)
            return error.reason
        artifact_file.fill(place.path, place.nonce, digest, np.full(size, number, np.uint8))
        ref = self.store.adopt(place)
        self.kept.append(digest)
        if needed:
            self.needed.add(digest)
        return ref

    def numbers(self):
        return [int.from_bytes(digest, "big") for digest in self.kept]

async def main():
    folder = tempfile.mkdtemp(dir="/tmp")
    said = {}
    async with RpcServer(f"unix:{folder}/a") as one, RpcServer(f"unix:{folder}/b") as two:
        a, b = Producer(one, "a"), Producer(two, "b")
        await one.ready()
        await two.ready()
        said["kept"] = a.store.space.kept_bytes(1 << 40), a.store.space.kept_bytes(1000)
        for number in range(20):  # more than there is room for
            await a.add(number, MIB)
        said["a alone"] = a.numbers()
        await b.add(100, 3 * MIB, needed=True)  # a gives way
        said["after b"] = a.numbers(), b.numbers()
        said["whole"] = await b.add(101, 8 * MIB)
        # What is needed stays, whoever asks; what is not goes for one that needs nearly all.
        said["needed"] = await a.add(21, 6 * MIB)
        b.needed.clear()
        ref = await a.add(22, 6 * MIB)
        said["given way"] = a.numbers(), b.numbers()
        # Memory of an artifact that a consumer has mapped comes back when it lets go.
        held = artifacts.ArtifactReader().try_open_local(ref)
        asyncio.get_running_loop().call_later(0.2, lambda: held_away.clear())
        held_away = [held]
        del held
        said["after a mapping"] = type(await b.add(102, 6 * MIB)).__name__
        # Somebody else's file stays: the producer says so after a time, and goes on when there is room again.
        foreign = ROOT.parent / "foreign"
        foreign.write_bytes(bytes(MIB))
        b.needed.add(b.kept[0])
        said["foreign"] = await a.add(23, 2 * MIB)
        foreign.unlink()
        b.needed.clear()
        said["again"] = type(await a.add(24, 2 * MIB)).__name__
        # What a producer that died has left is removed.
        dead = ROOT / "dead"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "old").write_bytes(bytes(4 * MIB))
        said["over the dead"] = type(await a.add(25, 7 * MIB)).__name__, dead.exists()
        for producer in (a, b):
            await producer.neighbours.close()
            producer.store.close()
    print(json.dumps(said))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def said() -> Any:
    done = subprocess.run(
        with_shared_memory("8m", (sys.executable, "-c", PROGRAM)),
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_producer_keeps_its_share(said: Any) -> None:
    share, little = said["kept"]
    assert 2 * share <= 6 * MIB  # a quarter is for what is under way
    assert share > 5 * MIB // 2
    assert little == 1000


def test_what_is_not_needed_goes_where_writing_fails(said: Any) -> None:
    assert said["a alone"] == list(range(13, 20))
    left, theirs = said["after b"]
    assert theirs == [100]
    assert left == list(range(20 - len(left), 20))  # the oldest went
    assert len(left) <= 4


def test_what_is_needed_stays(said: Any) -> None:
    assert said["needed"] == "ARTIFACT_SPACE"
    assert said["given way"] == [[22], []]


def test_more_than_the_whole_is_refused_at_once(said: Any) -> None:
    assert said["whole"] == "MEDIA_OVER_SHARED_MEMORY"


def test_memory_is_waited_for(said: Any) -> None:
    assert said["after a mapping"] == "ArtifactRef"
    assert said["foreign"] == "ARTIFACT_SPACE"
    assert said["again"] == "ArtifactRef"
    assert said["over the dead"] == ["ArtifactRef", False]
