"""Fixtures for every test: a real Redis. Nothing is tested with protos that are not compiled."""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

# Tests start servers while gRPC runs in this process. Its handlers for forks, which nobody here needs, can crash the
# child before it has become another program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pytest
import redis
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.support.compiled_protos import changed_protos

if changed := changed_protos():
    pytest.exit(f"{', '.join(changed)} changed since protos/ was compiled: run `make proto`", 4)

from services.launcher.redis.embedded_redis import EmbeddedRedis
from tests.support.distribution import FilesAndGroups

# Each run tries the same inputs, however slow the machine is; `make test-full` looks for others.
settings.register_profile(
    "random",
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("same", settings.get_profile("random"), max_examples=50, derandomize=True)
settings.load_profile("same")


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """What programs keep from one start to the next is theirs for one run of the tests, which its workers share."""
    # Nor are modules compiled anew by each worker, and by each program that a test starts.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="tessera-cache-")


@pytest.hookimpl
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that is imported and collected stays: to look whether it is garbage, again and again, takes a while."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)  # as services do
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndGroups | None:
    """Of `--dist loadgroup`."""
    return FilesAndGroups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test and its fixtures draw of torch's own generator does not depend on the tests before it, and torch
    computes on one thread: threads of several workers on the same cores mostly wait for each other.
    """
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder with a path short enough for unix sockets (pytest's own are too long)."""
    folder = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One Redis for the session. A test that stops or kills one takes `private_redis`."""
    folder = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp"))
    with EmbeddedRedis(folder, folder / "r.sock", persistent=False) as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """Address of the session's Redis, emptied before the test."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def private_redis(short_tmp: Path) -> Iterator[EmbeddedRedis]:
    """A running Redis with an append-only file for one test alone, to stop, kill and restart."""
    with EmbeddedRedis(short_tmp / "redis", short_tmp / "r.sock") as server:
        yield server
