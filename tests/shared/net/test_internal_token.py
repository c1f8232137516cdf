"""Services of one system authenticate each other by a token, where there is one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.artifacts.store import SERVICE_NAME, ArtifactServicer, ArtifactStore
from shared.errors import InvalidRequest
from shared.net import healthcheck, internal_token
from shared.net.channels import open_channel
from shared.net.rpc.server import RpcServer
from shared.settings import child_environment
from tessera.artifact.v1 import artifact_pb2_grpc
from tessera.artifact.v1.artifact_pb2 import FetchArtifactRequest

DIGEST = bytes(16)


@pytest.fixture
def token_file(tmp_path: Path) -> Iterator[Path]:
    """A token that this process uses for the time of a test."""
    file = tmp_path / "token"
    file.write_text("between us\n")
    file.chmod(0o600)
    internal_token.use(file)
    yield file
    internal_token.use(None)


@pytest.fixture
async def address(token_file: Path, tmp_path: Path) -> AsyncIterator[str]:
    """A service that streams an artifact of 12 bytes."""
    store = ArtifactStore(tmp_path / "artifacts", "producer", "")
    store.put(DIGEST, np.arange(3, dtype=np.float32))
    async with RpcServer("127.0.0.1:0", grace_s=0) as server:
        register = artifact_pb2_grpc.add_ArtifactServiceServicer_to_server
        server.add(SERVICE_NAME, register, ArtifactServicer(store))
        await server.ready()
        yield server.address
    store.close()


async def fetched(channel: grpc.aio.Channel, **options: Any) -> bytes:
    stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
    call = stub.FetchArtifact(FetchArtifactRequest(digest=DIGEST), timeout=60, **options)
    return b"".join([piece.data async for piece in call])


async def test_callers_with_the_token_are_served(address: str) -> None:
    async with open_channel(address) as channel:
        assert len(await fetched(channel)) == 12
        assert len(await fetched(channel, metadata=(("more", "said"),))) == 12


@pytest.mark.parametrize("sent", [None, "", "between", "between us all"])
async def test_callers_without_the_token_are_refused(address: str, sent: str | None) -> None:
    metadata = () if sent is None else (("tessera-internal-token", sent),)
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="--internal-token-file") as refused:
            await fetched(channel, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        method: Any = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/No")
        assert await method(b"", metadata=metadata).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_checks_need_no_token(address: str) -> None:
    assert await asyncio.to_thread(healthcheck.check, address) == "ready"
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_public_server_requires_no_internal_token(token_file: Path) -> None:
    async with RpcServer("127.0.0.1:0", grace_s=0, public=True) as server:
        await server.ready()
        async with grpc.aio.insecure_channel(server.address) as channel:
            method: Any = channel.unary_unary("/no.such.Service/Method")
            assert await method(b"").code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("content", ["", "# nothing\n", "one\ntwo\n"])
def test_a_file_without_one_token_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match="--internal-token-file"):
        internal_token.use(file)


async def test_a_service_open_to_others_needs_a_token(token_file: Path) -> None:
    async def starts(listen: str, **options: Any) -> None:
        async with RpcServer(listen, grace_s=0, **options):
            pass

    everywhere = ("0.0.0.0:0", "[::]:0")
    for listen in everywhere:
        await starts(listen)
    internal_token.use(None)
    for listen in ("127.0.0.1:0", "[::1]:0", "localhost:0", f"unix:{token_file}.sock"):
        await starts(listen)
    for listen in (*everywhere, "192.0.2.1:0", "decoder.example:0", "unix.example:0"):
        with pytest.raises(InvalidRequest, match="--internal-token-file") as refused:
            await starts(listen)
        assert refused.value.reason == "NO_INTERNAL_TOKEN"
    await starts("0.0.0.0:0", public=True)  # clients have keys


def test_a_service_started_open_to_others_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.scheduler", "--listen", "0.0.0.0:0"]
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        command,
        env=child_environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "--internal-token-file" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
