"""The containers of compose.yaml as a project of their own, on free ports."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from shared.queue.keys import Keys
from tessera.scheduler.v1 import scheduler_pb2
from tests.support.network.ports import free_ports

_ROOT = Path(__file__).parents[3]


class Stack:
    """`with Stack() as stack:` builds, starts, waits until all are healthy; at the end removes all."""

    def __init__(
        self,
        project: str = "tessera-check",
        served_model: str = "tessera-demo",
        files: Sequence[str] = ("compose.yaml",),
        **environment: str,
    ) -> None:
        """`environment`: the variables that compose.yaml names."""
        self._environment = environment
        self._files = [part for name in files for part in ("--file", name)]
        self.port, self.grpc_port = free_ports(2)
        self.project = project
        self.served_model = served_model
        self._redis_host: str | None = None

    @property
    def base_url(self) -> str:
        """What an OpenAI client is pointed at."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC API."""
        return f"127.0.0.1:{self.grpc_port}"

    def compose(self, *arguments: str, within_s: float = 1200) -> str:
        """Runs `docker compose`; what it printed. Fails with all it said."""
        ports = {"PORT": str(self.port), "GRPC_PORT": str(self.grpc_port)}
        result = subprocess.run(
            ["docker", "compose", *self._files, "--project-name", self.project, *arguments],
            cwd=_ROOT,
            env={**os.environ, **ports, **self._environment},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert result.returncode == 0, f"compose {arguments}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def up(self, **scale: int) -> None:
        """Starts what does not run, and waits until all are healthy; `vision_encoder=2` scales."""
        flags = [f"--scale={service.replace('_', '-')}={count}" for service, count in scale.items()]
        try:
            self.compose("up", "--detach", "--no-recreate", "--wait", "--wait-timeout=300", *flags)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The last lines of every container."""
        return self.compose("logs", "--no-color", "--tail=40")

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What `docker inspect` says of each running container of a service."""
        ids = self.compose("ps", "--quiet", service.replace("_", "-")).split()
        output = subprocess.check_output(["docker", "inspect", *ids], text=True)
        found: list[dict[str, Any]] = json.loads(output)
        return found

    def host_pid(self, service: str, number: int = 0) -> int:
        """Process id, as this machine sees it, of a container's first process."""
        pid: int = self.containers(service)[number]["State"]["Pid"]
        return pid

    def restarts(self, service: str) -> int:
        """How often Docker has started containers of a service again."""
        return sum(container["RestartCount"] for container in self.containers(service))

    def members(self, service: str) -> dict[str, str]:
        """Instance id -> address of every live process of a service, from the registry."""
        prefix = Keys(self.served_model).prefix
        with self._redis() as client:
            now_ms = client.time()[0] * 1000
            live = client.zrangebyscore(f"{prefix}:instances:{service}", now_ms, "+inf")
            addresses = client.hgetall(f"{prefix}:addresses:{service}")
        return {i.decode(): addresses[i].decode() for i in live if i in addresses}

    def decoder_steps(self) -> dict[str, int]:
        """Decoder id -> steps run since it was leased, as the live schedulers say."""
        steps: dict[str, int] = {}
        with self._redis() as client:
            for load in client.hgetall(Keys(self.served_model).load).values():
                response = scheduler_pb2.GetLoadResponse.FromString(load)
                steps.update({decoder.decoder_id: decoder.steps for decoder in response.decoders})
        return steps

    def _redis(self) -> redis.Redis:
        if self._redis_host is None:
            (network,) = self.containers("redis")[0]["NetworkSettings"]["Networks"].values()
            self._redis_host = str(network["IPAddress"])
        return redis.Redis(host=self._redis_host, password=self.redis_password())

    def redis_password(self) -> str:
        """What this project's Redis wants."""
        return self.compose("exec", "-T", "redis", "cat", "/secrets/redis-password").strip()

    def artifacts(self, instance_id: str) -> int:
        """How many artifacts an instance holds in shared memory."""
        program = f"import os; print(len(os.listdir('/artifacts/{instance_id}')) - 1)"  # its lock
        return int(self.compose("exec", "-T", "decoder", "python", "-c", program))

    def __enter__(self) -> Self:
        self.compose("build")
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.compose("down", "--volumes", "--remove-orphans")
