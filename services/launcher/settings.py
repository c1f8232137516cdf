"""What `tessera serve`, `chat` and `doctor` can be told. Flags have vLLM's names where they mean the same."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from services.launcher.tls_settings import TlsClientSettings
from shared import access
from shared.errors import InvalidRequest
from shared.net.redis_url import with_password
from shared.settings import DEMO_MODEL, Settings, default_model_name, state_home


class ServeSettings(Settings):
    """Everything on one machine."""

    model: CliPositionalArg[Path] = Field(
        DEMO_MODEL,
        description="Hugging Face checkpoint folder, or a model's name on the hub; the demo model unless given.",
    )
    revision: str = Field(
        "", description="Branch, tag or commit of a model from the hub; main unless given."
    )
    host: str = Field("127.0.0.1", description="Address of the REST and gRPC doors.")
    port: int = Field(8000, ge=1, le=65535, description="Port of the REST door.")
    grpc_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the gRPC door; --port + 1 unless given."
    )
    served_model_name: str = Field(
        "", description="The model's name in requests; that of the folder or hub unless given."
    )
    api_key: str | None = Field(
        None,
        description="Keys, separated by commas, of which every request must carry one. Better in the environment"
        " (TESSERA_API_KEY) or a file: flags stand in the list of processes.",
    )
    api_key_file: Path | None = Field(
        None, description="File of further keys, one a line; lines with # are comments."
    )
    allow_unauthenticated: bool = Field(
        False, description="Starts without a key on an address that other machines can reach."
    )
    share_prefix_cache: bool = Field(
        False, description="Callers with different keys share what was computed of equal prompts."
    )
    ssl_certfile: Path | None = Field(
        None, description="Certificate chain in PEM: both doors speak TLS with it."
    )
    ssl_keyfile: Path | None = Field(
        None, description="Its private key, without a password; in --ssl-certfile unless given."
    )
    ssl_ca_certs: Path | None = Field(
        None, description="Authorities in PEM by which client certificates are checked."
    )
    ssl_cert_reqs: int | None = Field(
        None,
        ge=0,
        le=2,
        description="Client certificates: 0 is none, 1 checked if one comes, 2 needed.",
    )
    cors_allow_origins: str | None = Field(
        None,
        description="Origins, separated by commas, whose web pages may call the REST door; * is any; none unless"
        " given.",
    )
    allowed_hosts: str | None = Field(
        None,
        description="Names, separated by commas, by which the REST door may be called, beside localhost; * is any.",
    )

    device: str | None = Field(
        None,
        description="cpu or cuda, for decoders and encoders; cuda for decoders where there is one, otherwise cpu"
        " unless given.",
    )
    dtype: str | None = Field(
        None,
        description="float32, bfloat16 or float16; unless given bfloat16, on the CPU float32 for checkpoints"
        " stored so and small ones.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of prompt and answer; the checkpoint's length unless given."
    )
    max_choices: int | None = Field(
        None,
        ge=1,
        le=512,
        description="Most answers (n) or candidates (best_of) of one request; 128 unless given.",
    )
    max_prompts: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Most prompts of one request for completions; 128 unless given.",
    )
    max_logprobs: int | None = Field(
        None,
        ge=0,
        le=1000,
        description="Most top log-probabilities for each token; 20 unless given.",
    )
    max_waiting_requests: int | None = Field(
        None,
        ge=1,
        description="Requests in all (preparing, waiting, running) before a 429; 1024 unless given.",
    )
    max_waiting_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that all those may cost together before a 429; 4194304 unless given.",
    )
    queue_timeout: float | None = Field(
        None,
        ge=0,
        le=86400,
        description="Seconds that a request may wait to be taken; 0, which is any, unless given.",
    )
    first_token_timeout: float | None = Field(
        None,
        ge=0,
        le=86400,
        description="Seconds from arrival to the first token; 0, which is any, unless given.",
    )
    request_timeout: float | None = Field(
        None,
        ge=0,
        le=86400,
        description="Seconds from arrival to the end; 0, which is any, unless given.",
    )
    tenant_weights: str | None = Field(
        None,
        description="Shares under load: key:<API key>=4,user:<name>=0.5; who is not named has 1.",
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Sequences that one decoder runs at once; 256 unless given."
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that one decoder computes in a step; 272 on the CPU, 2176 on cuda unless given.",
    )
    step_target_ms: float | None = Field(
        None,
        ge=0,
        description="Milliseconds that a step may take while streams generate; 0 is any; 250 unless given.",
    )
    num_host_blocks: int | None = Field(
        None,
        ge=0,
        description="Blocks of each decoder in host memory, for sequences swapped out; unless given as many as the"
        " cache has, in a tenth of the free host memory at most.",
    )
    scheduling_policy: str | None = Field(
        None,
        pattern="^(fcfs|priority)$",
        description="fcfs, or priority: who is admitted first and preempted last; fcfs unless given.",
    )
    preemption_mode: str | None = Field(
        None,
        pattern="^(auto|recompute|swap)$",
        description="auto, recompute or swap: what becomes of computed tokens when blocks run out; auto unless given.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of KV cache for each decoder; unless given the least of 4 GiB (512 MiB for a model below 100"
        " million parameters), its part of --gpu-memory-utilization, and what all its sequences may take.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Largest share of a CUDA device's memory for all decoders (0.9 unless given), or of the host"
        " memory that is free (0.4).",
    )

    preprocessors: int = Field(1, ge=1, le=64, description="Preprocess processes.")
    vision_encoders: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Vision encoder processes; 1, or 0 for a text-only model, unless given.",
    )
    decoders: int = Field(1, ge=1, le=64, description="Decoder processes, each with the model.")
    gateways: int = Field(
        1, ge=1, le=16, description="Gateway processes; the second listens 10 ports further on."
    )

    schedulers: int = Field(
        1,
        ge=1,
        le=16,
        description="Scheduler processes; a second one is there when the first dies.",
    )
    spares: bool = Field(
        False,
        description="Holds a process of each ready that has imported its libraries: what dies is back sooner.",
    )
    shutdown_timeout: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Seconds that open answers may run on after Ctrl-C or SIGTERM.",
    )

    redis_url: str = Field(
        "",
        description="A Redis of your own (redis://, rediss:// or unix://); one is started unless given.",
    )
    redis_password_file: Path | None = Field(
        None, description="File with the password of that Redis, where the URL holds none."
    )
    state_dir: Path | None = Field(
        None,
        description="Folder of the queue's file; $XDG_STATE_HOME/tessera/<port> or ~/.local/state/tessera/<port>"
        " unless given.",
    )
    chat_template: Path | None = Field(
        None, description="File with a chat template to use instead of the checkpoint's own."
    )
    language_model_only: bool = Field(
        False, description="Refuses pictures and videos, and starts no vision encoder."
    )
    limit_mm_per_prompt: str | None = Field(
        None, description="Largest number of images and videos in a prompt; image=16 unless given."
    )
    max_video_frames: int | None = Field(
        None, ge=1, le=1024, description="Largest number of frames of a video; 128 unless given."
    )
    allowed_media_domains: str | None = Field(
        None,
        description="Hosts that images may be fetched from, separated by commas; any unless given.",
    )
    allow_private_media: bool = Field(
        False, description="Fetches images from private networks too. Unsafe on a shared network."
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_format: str = Field("text", pattern="^(text|json)$", description="text or json lines.")

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or default_model_name(self.model)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, one by one. Raises InvalidRequest if none was given where one was asked for."""
        return access.given_keys(self.api_key, self.api_key_file)

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
        """Port of the first gateway's gRPC door."""
        return self.grpc_port or self.port + 1

    @property
    def state_folder(self) -> Path:
        """Where the queue is kept between runs."""
        return (self.state_dir or state_home() / "tessera" / str(self.port)).absolute()


class ChatSettings(TlsClientSettings):
    """A conversation in the terminal."""

    # Not TESSERA_ alone: TESSERA_MODEL is a folder, which means nothing to a client.
    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_CHAT_",)
    COMMON_VARIABLES: ClassVar[frozenset[str]] = frozenset({"api_key"})

    url: str = Field(
        "http://127.0.0.1:8000/v1",
        description="Base URL of the REST door; several gateways of one system, separated by commas.",
    )
    model: str = Field("", description="The served model; the only one unless given.")
    image: list[Path] = Field([], description="A picture for the first question; may be repeated.")
    system: str = Field("", description="System message.")
    max_tokens: int | None = Field(None, ge=1, description="Longest answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 always takes the likeliest.")
    api_key: str | None = Field(
        None, description="The server's key, if it has one; TESSERA_API_KEY unless given."
    )
    api_key_file: Path | None = Field(
        None, description="File with that key, in its first line that is no # comment."
    )

    @property
    def key(self) -> str:
        """What is sent; empty for none. Raises InvalidRequest if the file holds none."""
        return access.client_key(self.api_key, self.api_key_file)

    @property
    def urls(self) -> list[str]:
        """The gateways, one by one."""
        return [url for part in self.url.split(",") if (url := part.strip())]


class DoctorSettings(Settings):
    """What to look at."""

    host: str = Field("127.0.0.1", description="Address that `serve` would listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port that `serve` would listen on.")
    grpc_port: int | None = Field(None, ge=1, le=65535, description="Its gRPC port.")
    redis_url: str = Field("", description="A Redis of your own, to be checked.")
    model: Path = Field(
        DEMO_MODEL, description="Hugging Face checkpoint folder, or a model's name on the hub."
    )
    revision: str = Field("", description="Branch, tag or commit of a model from the hub.")
    device: str = Field("auto", description="The device that `serve` would be given.")
    dtype: str = Field("auto", description="The number format that `serve` would be given.")
