"""The processes of a whole system: the command and the environment of each of them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.decoder.settings import DecoderSettings
from services.families import registry
from services.gateway.settings import GatewaySettings
from services.launcher.ascend.placement import Placement, place
from services.launcher.service_environment import (
    KEY_VARIABLES,
    LIBRARIES,
    PATHS,
    QUIET_GRPC,
    threads_of_libraries,
    usual_groups,
)
from services.launcher.settings import ServeSettings
from services.launcher.state.folders import Folders
from services.launcher.supervise.fork_servers import ForkServers, Group
from services.launcher.supervise.forking import ForkServer
from services.launcher.supervise.probe import HeartbeatProbe
from services.launcher.supervise.process import Program
from services.preprocess.settings import PreprocessSettings
from services.scheduler.settings import SchedulerSettings
from services.vision_encoder.settings import VisionEncoderSettings
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.hardware import processors
from shared.hardware.devices import resolve_device
from shared.hardware.npu_leases import ENCODER_SHARE, SHARE_BESIDE_ENCODER
from shared.lora.modules import absolute
from shared.net.host_port import join
from shared.net.metrics_page import split_address
from shared.settings import (
    VISIBLE_NPUS,
    ServiceSettings,
    child_environment,
    python_path,
    unless_set,
)

_PORTS_APART = 10  # between one gateway and the next

# Services that compute keep a core busy; the others need one for a moment, but at once, and go first.
_WORKERS = ("decoder", "vision_encoder", "preprocess")
_WORKER_NICENESS = 8

# Until NPUs whose rank was killed can be joined again: CANN reports EJ0001 before that.
_RANKS_PAUSE_S = 10.0

SERVICE_SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "preprocess": PreprocessSettings,
    "vision_encoder": VisionEncoderSettings,
    "decoder": DecoderSettings,
}


@dataclass(frozen=True)
class GatewayAddress:
    """Where one gateway listens."""

    host: str
    port: int
    grpc_port: int
    has_tls: bool = False

    @property
    def probe_host(self) -> str:
        """The address by which this machine reaches it."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        """Base URL of the REST API."""
        host = f"[{self.probe_host}]" if ":" in self.probe_host else self.probe_host
        return f"{'https' if self.has_tls else 'http'}://{host}:{self.port}"


def gateway_addresses(settings: ServeSettings) -> list[GatewayAddress]:
    """One for each gateway."""
    offsets = range(0, settings.gateways * _PORTS_APART, _PORTS_APART)
    return [
        GatewayAddress(
            settings.host,
            settings.port + offset,
            settings.first_grpc_port + offset,
            has_tls=settings.ssl_certfile is not None,
        )
        for offset in offsets
    ]


def count_encoders(settings: ServeSettings) -> int:
    """Vision encoders that are started. Raises InvalidRequest if the model is of no known architecture."""
    if settings.vision_encoders is not None:
        return settings.vision_encoders
    return int(takes_pictures(settings))


def takes_pictures(settings: ServeSettings) -> bool:
    """Whether the system's model looks at pictures. Raises InvalidRequest if it is of no known architecture."""
    family = registry.find(Checkpoint(settings.model, settings.family))
    return family.takes_media and not settings.language_model_only


def metrics_addresses(settings: ServeSettings, encoders: int) -> dict[str, str]:
    """Where each process has its page of metrics, host:port by its name; empty where none has one. Raises
    InvalidRequest for an address that is none, or leaves no ports."""
    if not settings.metrics_listen:
        return {}
    host, first = split_address(settings.metrics_listen)
    counts = {
        "gateway": settings.gateways,
        "scheduler": settings.schedulers,
        "decoder": settings.decoders,
        "vision_encoder": encoders,
        "preprocess": settings.preprocessors,
    }
    names = ["launcher", *(name for s, count in counts.items() for name in _names(s, count))]
    if not 1 <= first <= 65_536 - len(names):
        raise InvalidRequest(
            "BAD_ADDRESS",
            f"--metrics-listen: {len(names)} pages need as many ports, beginning with {first}",
            field="metrics_listen",
        )
    return {name: join(host, first + number) for number, name in enumerate(names)}


class ServiceCommands:
    """Builds the program of every process, from the settings and the folders of this instance."""

    def __init__(
        self,
        settings: ServeSettings,
        folders: Folders,
        redis_url: str,
        npus: Sequence[int] = (),
        fork_servers: ForkServers | None = None,
    ) -> None:
        """npus: the devices that decoders and encoders are divided among; fork_servers: what forks services where it
        can. Raises InvalidRequest if the model is of no
        known architecture, or for too few devices.
        """
        self._settings = settings
        self._folders = folders
        self._redis_url = redis_url
        self._fork_servers = fork_servers
        self._encoders = count_encoders(settings)
        self.metrics = metrics_addresses(settings, self._encoders)
        ranks = settings.tensor_parallel_size
        self._placement = (
            place(npus, settings.decoders, self._encoders, ranks) if npus else Placement([], [])
        )

    def gateways(self) -> list[Program]:
        """One for each address."""
        names = _names("gateway", self._settings.gateways)
        return [
            Program(
                name,
                _command("gateway"),
                self._environment(
                    "gateway",
                    threads=1,
                    host=address.host,
                    port=str(address.port),
                    grpc_port=str(address.grpc_port),
                    shutdown_timeout=str(self._settings.shutdown_timeout),
                    heartbeat=str(self._folders.heartbeat(name)),
                    **self._page(name),
                ),
                HeartbeatProbe(self._folders.heartbeat(name)),
                service="gateway",
                prewarm_command=self._prewarm_command("gateway"),
                fork_server=self._fork_server("gateway", threads=1),
            )
            for name, address in zip(names, gateway_addresses(self._settings), strict=True)
        ]

    def _page(self, name: str) -> dict[str, str]:
        """Where a process has its page of metrics."""
        return {"metrics_listen": self.metrics[name]} if self.metrics else {}

    def schedulers(self) -> list[Program]:
        """One serves all decoders; a second one takes over when it ends, or serves half of them."""
        return self._internal("scheduler", self._settings.schedulers, threads=1)

    def workers(self) -> list[Program]:
        """Decoders, encoders and preprocessors."""
        decoders, encoders, placement = self._settings.decoders, self._encoders, self._placement
        sharers = placement.sharers if placement.decoders else decoders
        return [
            *self._internal(
                "decoder",
                decoders,
                threads=_share(decoders),
                npus=placement.decoders,
                shutdown_timeout=str(self._settings.shutdown_timeout),
                memory_sharers=str(sharers),
                **self._memory_share(),
            ),
            *self._internal(
                "vision_encoder",
                encoders,
                threads=_share(encoders),
                npus=placement.encoders,
                **self._encoder_share(),
            ),
            *self._internal("preprocess", self._settings.preprocessors, threads=1),
        ]

    def _pause_s(self, service: str) -> float:
        """See `Program`."""
        has_ranks = service == "decoder" and self._settings.tensor_parallel_size > 1
        return _RANKS_PAUSE_S if has_ranks and self._placement.decoders else 0.0

    def _memory_share(self) -> dict[str, str]:
        """The decoders' share of an NPU that an encoder computes on too, unless one was given."""
        is_given = "gpu_memory_utilization" in self._settings.model_fields_set
        if is_given or not self._placement.is_shared_with_encoder:
            return {}
        return {"gpu_memory_utilization": str(SHARE_BESIDE_ENCODER)}

    def _encoder_share(self) -> dict[str, str]:
        """That of each encoder where one computes on a decoder's NPU."""
        if not self._placement.is_shared_with_encoder:
            return {}
        return {"encoder_memory_utilization": str(ENCODER_SHARE / self._encoders)}

    def _internal(
        self,
        service: str,
        count: int,
        threads: int,
        npus: Sequence[Sequence[int]] = (),
        **own: str,
    ) -> list[Program]:
        """Services that only other services call, each on a unix socket of its own; npus: the devices of each."""
        programs = []
        for number, name in enumerate(_names(service, count)):
            path = self._folders.socket(name)
            listen = f"unix:{path}"
            heartbeat = self._folders.heartbeat(name)
            environment = self._environment(
                service,
                threads,
                listen=listen,
                advertise=listen,
                heartbeat=str(heartbeat),
                **self._page(name),
                **own,
            )
            if npus:
                environment[VISIBLE_NPUS] = ",".join(map(str, npus[number]))
            programs.append(
                Program(
                    name,
                    _command(service),
                    environment,
                    HeartbeatProbe(heartbeat),
                    path,
                    service=service,
                    prewarm_command=self._prewarm_command(service),
                    fork_server=self._fork_server(service, threads),
                    niceness=_WORKER_NICENESS if service in _WORKERS else 0,
                    pause_s=self._pause_s(service),
                )
            )
        return programs

    def _prewarm_command(self, service: str) -> list[str]:
        """The command of a prewarmed process; empty unless they are asked for."""
        program = str(Path(__file__).with_name("supervise") / "prewarmed_process.py")
        return (
            [sys.executable, "-P", program, f"services.{service}"]
            if self._settings.prewarmed_processes
            else []
        )

    def _fork_server(self, service: str, threads: int) -> ForkServer | None:
        if self._fork_servers is None:
            return None
        return self._fork_servers.of(service, threads_of_libraries(threads))

    def _environment(self, service: str, threads: int, **own: str) -> dict[str, str]:
        """The service's settings under its own prefix, which goes before variables for all services."""
        settings = self._settings
        has_adapters = "lora_modules" in _passed_on(settings, service)
        values = {
            **{name: str(getattr(settings, name)) for name in _passed_on(settings, service)},
            **({"lora_modules": absolute(settings.lora_modules)} if has_adapters else {}),
            "model": str(settings.model.absolute()),
            "served_model_name": settings.model_name,
            "redis_url": self._redis_url,
            "artifact_dir": str(self._folders.artifacts),
            "log_level": settings.log_level,
            "log_format": settings.log_format,
            **own,
        }
        if threads:
            values["threads"] = str(threads)
        # Only the gateway gets keys: what other services start would inherit them.
        hidden = () if service == "gateway" else KEY_VARIABLES
        prefix = f"TESSERA_{service.upper()}_"
        variables = {prefix + name.upper(): value for name, value in values.items()}
        return child_environment(
            *hidden,
            **variables,
            PYTHONPATH=python_path(*PATHS),
            **threads_of_libraries(threads),
            **QUIET_GRPC,
            **(unless_set(**LIBRARIES) if self._settings.prewarmed_processes else {}),
        )


def _passed_on(settings: ServeSettings, service: str) -> list[str]:
    """Settings that the service has too and that were given; for all others its own defaults hold."""
    known = SERVICE_SETTINGS[service].model_fields
    return [name for name in known if name in settings.model_fields_set]


def fork_groups(settings: ServeSettings) -> list[Group]:
    """The services that are forked, by the process that has imported their libraries; none where services are started
    each on its own: for other devices than the CPU, whose libraries do not survive a fork.
    """
    is_host = resolve_device(settings.device) == "cpu"
    return usual_groups(_share(settings.decoders)) if is_host else []


def _share(replicas: int) -> int:
    """Threads for each of several processes that compute at the same time; 0 leaves it to the only one."""
    if replicas <= 1:
        return 0
    return max(1, processors.threads() // replicas)


def _command(service: str) -> list[str]:
    # -P: without the working directory on the path, where a folder may be called `services` or `shared` too.
    return [sys.executable, "-P", "-m", f"services.{service}"]


def _names(service: str, count: int) -> list[str]:
    """Such as "decoder", or "decoder-0" and "decoder-1"."""
    name = service.replace("_", "-")
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]
