"""Artifacts are mapped where they can be, fetched where not, and outlive their producers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shared.artifacts import file as artifact_file
from shared.artifacts import store as artifacts
from shared.artifacts.store import ArtifactReader, ArtifactServicer, ArtifactStore, remove_abandoned
from shared.errors import NotFound, Unavailable
from shared.net.rpc.server import RpcServer
from shared.settings import child_environment
from tessera.artifact.v1 import artifact_pb2_grpc
from tessera.artifact.v1.artifact_pb2 import ArtifactRef

DIGEST = b"0123456789abcdef"
OTHER = b"fedcba9876543210"
ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

PRODUCER = """
import sys, time
from pathlib import Path
import numpy as np
from shared.artifacts.store import ArtifactStore
store = ArtifactStore(Path(sys.argv[1]), "producer", "")
ref = store.put(b"0123456789abcdef", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
sys.stdout.write(ref.SerializeToString().hex() + "\\n")
sys.stdout.flush()
time.sleep(600)
"""


def moved(ref: ArtifactRef, path: Path | str) -> ArtifactRef:
    """The same artifact, said to be elsewhere."""
    other = ArtifactRef()
    other.CopyFrom(ref)
    other.location.path = str(path)
    other.location.address = ""
    return other


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path, "me", "")


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
async def test_a_stored_artifact_is_mapped(dtype: str, store: ArtifactStore) -> None:
    array = (ARRAY * 3).astype(dtype)
    ref = store.put(DIGEST, array[:, ::2])  # not contiguous
    assert (ref.dtype, list(ref.shape), ref.size_bytes) == (dtype, [2, 2, 4], 16 * array.itemsize)
    read = await ArtifactReader().open(ref)
    np.testing.assert_array_equal(read, array[:, ::2])
    assert not read.flags.writeable
    assert store.get(DIGEST) == ref
    assert store.put(DIGEST, array[:1]) == ref


async def test_bfloat16_comes_as_its_bits(store: ArtifactStore) -> None:
    bits = np.array([[0x3F80, 0x4000]], np.uint16)
    ref = store.put(DIGEST, bits, "bfloat16")
    assert ref.dtype == "bfloat16"
    read = await ArtifactReader().open(ref)
    assert read.dtype == np.uint16
    np.testing.assert_array_equal(read, bits)


async def test_a_mapping_outlives_eviction_and_the_store(store: ArtifactStore) -> None:
    ref = store.put(DIGEST, ARRAY)
    other = store.put(OTHER, ARRAY + 1)
    reader = ArtifactReader()
    held, also = await reader.open(ref), await reader.open(other)
    store.evict(DIGEST)
    store.evict(DIGEST)
    assert store.get(DIGEST) is None
    assert reader.try_open_local(ref) is None
    store.close()
    assert not Path(other.location.path).parent.exists()
    np.testing.assert_array_equal(held, ARRAY)
    np.testing.assert_array_equal(also, ARRAY + 1)


async def test_a_killed_producers_folder_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
    )
    with process:
        assert process.stdout is not None
        ref = ArtifactRef.FromString(bytes.fromhex(process.stdout.readline().decode()))
        mapped = await ArtifactReader().open(ref)
        alive = ArtifactStore(tmp_path, "alive", "")
        (tmp_path / "foreign").mkdir()
        assert remove_abandoned(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert remove_abandoned(tmp_path) == [tmp_path / "producer"]
    assert not (tmp_path / "producer").exists()
    assert (tmp_path / "alive").exists()
    assert (tmp_path / "foreign").exists()
    np.testing.assert_array_equal(mapped, ARRAY)
    assert remove_abandoned(tmp_path / "nothing here") == []
    alive.close()


async def test_fetching_gives_what_mapping_gives(tmp_path: Path, short_tmp: Path) -> None:
    big = np.random.default_rng(0).random((3, 1000, 1000), np.float32)  # several pieces
    async with RpcServer(f"unix:{short_tmp}/a.sock") as server:
        store = ArtifactStore(tmp_path, "far", server.address)
        server.add(
            artifacts.SERVICE_NAME,
            artifact_pb2_grpc.add_ArtifactServiceServicer_to_server,
            ArtifactServicer(store),
        )
        reader = ArtifactReader()
        for digest, array, dtype in (
            (DIGEST, big, None),
            (OTHER, np.arange(6, dtype=np.uint16), "bfloat16"),
            (b"e" * 16, np.empty((0, 4), np.float32), None),
        ):
            ref = store.put(digest, array, dtype)
            local = reader.try_open_local(ref)
            assert local is not None
            ref.location.path = "/nonexistent"
            assert reader.try_open_local(ref) is None
            fetched = await reader.open(ref)
            np.testing.assert_array_equal(fetched, local)
            assert fetched.dtype == local.dtype
            assert not fetched.flags.writeable
        short = ArtifactRef()
        short.CopyFrom(store.put(DIGEST, big))
        short.location.path = ""
        short.shape[:] = [10]
        short.size_bytes = 40
        with pytest.raises(Unavailable):
            await reader.open(short)
        store.evict(OTHER)
        with pytest.raises(NotFound):
            await reader.open(
                ArtifactRef(
                    digest=OTHER, dtype="uint8", shape=[1], size_bytes=1, location=ref.location
                )
            )
        address = server.address
        await reader.close()
    ref.location.address = address
    with pytest.raises(Unavailable):
        await (late := ArtifactReader()).open(ref)
    await late.close()
    store.close()


def test_hostile_paths_are_not_opened(store: ArtifactStore, tmp_path: Path) -> None:
    ref = store.put(DIGEST, ARRAY)
    path = Path(ref.location.path)
    reader = ArtifactReader()
    assert reader.try_open_local(moved(ref, path)) is not None

    link = tmp_path / "link"
    link.symlink_to(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:-1])
    longer = tmp_path / "longer"
    longer.write_bytes(path.read_bytes() + b"x")
    text = tmp_path / "text"
    text.write_text("not an artifact")
    for bad in (link, pipe, cut, longer, text, tmp_path, "/dev/zero", "/etc/passwd", "a\0b", ""):
        assert reader.try_open_local(moved(ref, bad)) is None, bad


def test_a_wrong_reference_is_refused(store: ArtifactStore) -> None:
    ref = store.put(DIGEST, ARRAY)
    reader = ArtifactReader()
    lies = [
        ("nonce", lambda r: setattr(r.location, "nonce", b"x" * 16)),
        ("digest", lambda r: setattr(r, "digest", OTHER)),
        ("dtype", lambda r: setattr(r, "dtype", "int32")),
        ("no dtype", lambda r: setattr(r, "dtype", "object")),
        ("shape", lambda r: r.shape.append(2)),
        ("negative", lambda r: r.shape.extend([-1, -1])),
    ]
    for name, lie in lies:
        other = moved(ref, ref.location.path)
        lie(other)  # type: ignore[no-untyped-call]
        assert reader.try_open_local(other) is None, name


def test_what_another_process_writes_is_checked(store: ArtifactStore) -> None:
    place = store.reserve(DIGEST)
    with pytest.raises(Unavailable):
        store.adopt(place)
    place.path.write_bytes(b"half")
    with pytest.raises(Unavailable):
        store.adopt(place)
    assert not place.path.exists()
    artifact_file.write(place.path, place.nonce, DIGEST, ARRAY)
    ref = store.adopt(place)
    np.testing.assert_array_equal(ArtifactReader().try_open_local(ref), ARRAY)
