"""Settings of `tessera serve`, `chat`, `check` and `doctor`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from services.decoder.settings import DecoderOptions
from services.gateway.settings import GatewayOptions
from services.launcher.client_settings import GatewayClientSettings
from services.preprocess.settings import PreprocessOptions
from services.scheduler.settings import SchedulerOptions
from shared.errors import InvalidRequest
from shared.net.redis.url import with_password
from shared.settings import (
    DEMO_MODEL,
    CommonSettings,
    ComputeSettings,
    FamilySettings,
    Settings,
    state_home,
)


class ServeSettings(
    DecoderOptions, SchedulerOptions, PreprocessOptions, GatewayOptions, CommonSettings
):
    """A whole system on one machine."""

    GROUP: ClassVar[str] = "processes and ports"
    SHORT: ClassVar[tuple[str, ...]] = (
        *("model", "served_model_name", "max_model_len", "device", "dtype", "quantization"),
        *("host", "port", "api_key_file", "max_waiting_requests", "tool_call_parser", "task"),
        *("decoders", "tensor_parallel_size", "vision_encoders", "gateways", "metrics_listen"),
        *("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"),
        *("gpu_memory_utilization", "lora_modules", "limit_mm_per_prompt", "chat_template"),
        *("redis_url", "state_dir", "log_level", "log_format"),
    )

    # Options of the services are inherited; each service is passed those that were given. Declared here are the options
    # that the launcher itself acts on.

    model: CliPositionalArg[Path] = Field(
        DEMO_MODEL,
        description="Hugging Face checkpoint folder, or a model's name on the hub; the demo model unless given.",
    )
    port: int = Field(8000, ge=1, le=65535, description="Port of the REST API.")
    grpc_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the gRPC API; --port + 1 unless given."
    )
    redis_url: str = Field(
        "",
        description="A Redis of your own (redis://, rediss:// or unix://); one is started unless given.",
    )
    state_dir: Path | None = Field(
        None,
        description="Folder of the queue's file; $XDG_STATE_HOME/tessera/<port> or ~/.local/state/tessera/<port>"
        " unless given.",
    )
    metrics_listen: str = Field(
        "",
        description="Address (host:port) of the first of the pages of metrics that each process has then, the others on"
        " the ports after it: the launcher's, then one for each process (metrics.json in the state folder has the"
        " list, for Prometheus). No pages but the gateways' own /metrics unless given.",
    )
    language_model_only: bool = Field(
        False, description="Refuses pictures and videos, and starts no vision encoder."
    )
    gateways: int = Field(
        1, ge=1, le=16, description="Gateway processes; the second listens 10 ports further on."
    )
    schedulers: int = Field(
        1,
        ge=1,
        le=16,
        description="Scheduler processes; a second one takes over when the first ends.",
    )
    preprocessors: int = Field(1, ge=1, le=64, description="Preprocess processes.")
    vision_encoders: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Vision encoder processes; 1, or 0 for a text-only model, unless given.",
    )
    decoders: int = Field(1, ge=1, le=64, description="Decoder processes, each with the model.")
    prewarmed_processes: bool = Field(
        False,
        description="Keeps one more process of each service that has imported its libraries: a service that ends is"
        " ready again sooner.",
    )
    shutdown_timeout: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Seconds that open answers may run on after Ctrl-C or SIGTERM.",
    )

    @property
    def queue_url(self) -> str:
        """The given Redis, with its password; empty if none was given. Raises InvalidRequest."""
        if self.redis_password_file is not None and not self.redis_url:
            raise InvalidRequest(
                "NO_REDIS_URL",
                "--redis-password-file is for a Redis of your own: give --redis-url too",
                field="redis_password_file",
            )
        return with_password(self.redis_url, self.redis_password_file)

    @property
    def first_grpc_port(self) -> int:
        """Port of the first gateway's gRPC API."""
        return self.grpc_port or self.port + 1

    @property
    def state_folder(self) -> Path:
        """Where the queue is kept between runs."""
        return (self.state_dir or state_home() / "tessera" / str(self.port)).absolute()


class ChatSettings(GatewayClientSettings):
    """A conversation in the terminal."""

    # Not TESSERA_ alone: TESSERA_MODEL is a folder, which means nothing to a client.
    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_CHAT_",)

    url: str = Field(
        "http://127.0.0.1:8000/v1",
        description="Base URL of the REST API; several gateways of one system, separated by commas.",
    )
    model: str = Field("", description="The served model; the only one unless given.")
    image: list[Path] = Field([], description="A picture for the first question; may be repeated.")
    system: str = Field("", description="System message.")
    max_tokens: int | None = Field(None, ge=1, description="Longest answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 always takes the likeliest.")

    @property
    def urls(self) -> list[str]:
        """The gateways, one by one."""
        return [url for part in self.url.split(",") if (url := part.strip())]


class LogsSettings(Settings):
    """Which request's log lines are shown."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_LOGS_",)

    request_id: CliPositionalArg[str] = Field(
        description="The request's id, or the X-Request-Id that its client gave."
    )
    state_dir: Path | None = Field(
        None,
        description="The --state-dir of the `tessera serve`; all below ~/.local/state/tessera unless given.",
    )


class WhySettings(GatewayClientSettings):
    """Where a request's time went, in all services: the largest part, and what it waited for."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_WHY_",)

    request_id: CliPositionalArg[str] = Field(
        description="The request's id, as in the header x-tessera-request-id or before the slash of an event's id."
    )
    url: str = Field("http://127.0.0.1:8000/v1", description="Base URL of the REST API.")
    user: str = Field(
        "", description="The `user` of the request, where the server has no keys and it had one."
    )
    state_dir: Path | None = Field(
        None,
        description="The --state-dir of the `tessera serve`, whose logs are looked at where there is no timeline; all"
        " below ~/.local/state/tessera unless given.",
    )


def log_folders(state_dir: Path | None) -> list[Path]:
    """The folders with logs of the system of a state folder, or of all systems of this user."""
    states = [state_dir] if state_dir is not None else sorted((state_home() / "tessera").glob("*"))
    return [folder for state in states if (folder := state / "logs").is_dir()]


class RunBatchSettings(GatewayClientSettings):
    """A file of requests in OpenAI's batch format, answered into another file."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_RUN_BATCH_",)

    input: CliPositionalArg[Path] = Field(
        description="File with a request in each line: custom_id, method, url, body."
    )
    output: CliPositionalArg[Path] = Field(
        description="File of the answers. OUTPUT.journal has those so far: the same command goes on with it."
    )
    base_url: str = Field(
        "",
        description="Base URL of a server that runs; services are started with MODEL and the options of `tessera serve`"
        " unless given.",
    )


class DoctorSettings(ComputeSettings, FamilySettings):
    """The settings of a `serve` that is to be checked."""

    host: str = Field("127.0.0.1", description="Address that `serve` would listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port that `serve` would listen on.")
    grpc_port: int | None = Field(
        None, ge=1, le=65535, description="Its gRPC port; --port + 1 unless given."
    )
    redis_url: str = Field("", description="A Redis of your own, to be checked.")
    model: Path = Field(
        DEMO_MODEL, description="Hugging Face checkpoint folder, or a model's name on the hub."
    )
    revision: str = Field("", description="Branch, tag or commit of a model from the hub.")
    npu: bool = Field(
        False,
        description="Looks at Ascend NPUs even if no device file is there, and tries every operation of theirs against"
        " the CPU's.",
    )


class CheckSettings(DecoderOptions, FamilySettings):
    """What is checked, for a decoder with these options."""

    model: CliPositionalArg[Path] = Field(
        DEMO_MODEL,
        description="Hugging Face checkpoint folder, or a model's name on the hub that is on this machine.",
    )
    revision: str = Field("", description="Branch, tag or commit of a model from the hub.")
