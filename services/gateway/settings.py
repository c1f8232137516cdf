"""Settings of the gateway. Names are vLLM's where the meaning is the same."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from shared import access
from shared.output_format.detect import AUTO
from shared.output_format.table import FORMATS, REASONING
from shared.settings import (
    ChatTemplateSettings,
    LoraSettings,
    ModelLengthSettings,
    ServiceSettings,
)


class GatewayOptions(ChatTemplateSettings, LoraSettings, ModelLengthSettings):
    """Settings of the gateway that `tessera serve` has too."""

    GROUP: ClassVar[str] = "API: who may ask, and how much"

    host: str = Field("127.0.0.1", description="Address of the REST and gRPC APIs.")
    tool_call_parser: str = Field(
        AUTO,
        description=f"How the model writes calls of tools: auto (what its chat template shows), none, or one of"
        f" {', '.join(FORMATS)}.",
    )
    reasoning_parser: str = Field(
        AUTO,
        description=f"How the model marks what it thinks before it answers: auto, none, or one of"
        f" {', '.join(REASONING)}.",
    )
    lora_adapter_id: str = Field(
        "",
        description="Name of the adapter that answers where a request names the model itself: of --lora-modules, or of"
        " lora_adapter.json in the model's folder; base is none. The only one of that file unless given.",
    )
    task: Literal["auto", "generate", "embed", "classify", "score"] = Field(
        "auto",
        description="What the model is served for: auto (what its files show), generate (text), embed (vectors),"
        " classify (labels), or score (how well texts answer a query).",
    )
    pooling: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="Which tokens make the vector of --task embed: auto (what the model's files say, else last), last,"
        " or mean of all.",
    )
    api_key: str | None = Field(
        None,
        description="Keys, separated by commas, of which every request must carry one. Better in the environment"
        " (TESSERA_API_KEY) or a file: flags can be read in the list of processes.",
    )
    api_key_file: Path | None = Field(
        None, description="File of further keys, one a line; lines with # are comments."
    )
    allow_unauthenticated: bool = Field(
        False, description="Starts without a key on an address that other machines can reach."
    )
    share_prefix_cache: bool = Field(
        False,
        description="Callers with different keys share what was computed of equal prompts: faster, but cached_tokens"
        " then shows one caller what another has asked.",
    )
    ssl_certfile: Path | None = Field(
        None, description="Certificate chain in PEM: both APIs are then served with TLS."
    )
    ssl_keyfile: Path | None = Field(
        None, description="Its private key, without a password; in --ssl-certfile unless given."
    )
    ssl_ca_certs: Path | None = Field(
        None, description="Authorities in PEM by which client certificates are checked."
    )
    ssl_cert_reqs: int = Field(
        0,
        ge=0,
        le=2,
        description="Client certificates: 0 is none, 1 checked if one comes, 2 needed.",
    )
    cors_allow_origins: str = Field(
        "",
        description="Origins, separated by commas, whose web pages may call the REST API; * is any.",
    )
    allowed_hosts: str = Field(
        "",
        description="Names, separated by commas, by which the REST API may be called, beside localhost; * is any."
        " Only localhost unless given, on a loopback address without a key.",
    )
    max_waiting_requests: int = Field(
        1024, ge=1, description="Requests in all (preparing, waiting, running) before a 429."
    )
    max_waiting_tokens: int = Field(
        4 << 20, ge=1, description="Tokens that all those may cost together before a 429."
    )
    tenant_weights: str = Field(
        "",
        description="Shares under load: key:<API key>=4,user:<name>=0.5; others have 1.",
    )
    max_choices: int = Field(
        128, ge=1, le=512, description="Most answers (n) or candidates (best_of) of one request."
    )
    max_prompts: int = Field(
        128, ge=1, le=1024, description="Most prompts of one request for completions."
    )
    max_logprobs: int = Field(
        20, ge=0, le=1000, description="Most top log-probabilities for each token of one request."
    )
    queue_timeout: float = Field(
        0.0,
        ge=0,
        le=86400,
        description="Seconds that a request may wait to be taken; 0 is any. One that probably"
        " would wait longer is a 429 when it comes.",
    )
    first_token_timeout: float = Field(
        0.0,
        ge=0,
        le=86400,
        description="Seconds from arrival to the first token; 0 is any. A"
        " request that probably would get it later is a 429 when it comes.",
    )
    request_timeout: float = Field(
        0.0, ge=0, le=86400, description="Seconds from arrival to the end; 0 is any."
    )

    response_keep: float = Field(
        86400.0,
        ge=0,
        le=30 * 86400,
        description="Seconds that responses of /v1/responses are kept for previous_response_id and GET, from when one"
        " is made or gone on with; 0 keeps none.",
    )
    response_store_bytes: int = Field(
        256 << 20,
        ge=1,
        description="Bytes of all kept responses; above them those that were used longest ago are forgotten.",
    )
    max_file_bytes: int = Field(
        64 << 20,
        ge=1024,
        le=512 << 20,
        description="Largest file of /v1/files; a larger one is a 413.",
    )
    file_store_bytes: int = Field(
        512 << 20,
        ge=1024,
        description="Bytes of all files of /v1/files and of the results of batches; a 429 above.",
    )
    file_keep: float = Field(
        30 * 86400.0,
        ge=1,
        le=366 * 86400,
        description="Seconds that files of /v1/files are kept unless they say otherwise, and batches beyond their end.",
    )

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, one by one. Raises InvalidRequest if none was given where one was asked for."""
        return access.given_keys(self.api_key, self.api_key_file)


class GatewaySettings(GatewayOptions, ServiceSettings):
    """Flags, and `TESSERA_GATEWAY_*` in the environment."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_GATEWAY_", "TESSERA_")

    port: int = Field(8000, ge=0, le=65535, description="Port of the REST API; 0 takes any.")
    grpc_port: int = Field(8001, ge=0, le=65535, description="Port of the gRPC API; 0 takes any.")
    published_host: str = Field(
        "",
        description="Address at which others reach --host, where that is inside a container; --host unless given.",
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, le=1 << 30, description="Largest request body; a larger one is a 413."
    )
    max_body_bytes_in_flight: int = Field(
        256 << 20,
        ge=1024,
        description="Bytes of all bodies that are being read or prepared, at least two of the largest; a 503 above.",
    )
    max_answer_bytes: int = Field(
        256 << 20,
        ge=1024,
        description="What a whole answer may become by n, max_tokens, top_logprobs and prompt_logprobs; a 400 above.",
    )
    max_answer_bytes_in_flight: int = Field(
        1 << 30,
        ge=1024,
        description="What all whole answers under way may become, at least one of the largest; a 503 above.",
    )
    request_body_timeout: float = Field(
        20.0, gt=0, le=3600, description="Seconds without a byte of a body before a 408."
    )
    max_header_bytes: int = Field(
        64 << 10, ge=1024, le=16 << 20, description="Bytes of address and headers before a 431."
    )
    max_header_count: int = Field(
        256, ge=8, le=65536, description="Headers of a request before a 431."
    )
    request_header_timeout: float = Field(
        20.0, gt=0, le=3600, description="Seconds that headers may take before a 408."
    )
    keep_alive_timeout: int = Field(
        75, ge=1, le=86400, description="Seconds that an idle connection is kept."
    )
    max_connections: int = Field(
        4096, ge=1, description="Connections of the REST API, and of the gRPC API."
    )
    max_concurrent_streams: int = Field(
        256, ge=1, le=65536, description="Calls at once on one gRPC connection."
    )
    shutdown_timeout: float = Field(
        30.0, ge=0, le=86400, description="Seconds that open answers may run on after SIGTERM."
    )
    language_model_only: bool = Field(
        False, description="Is ready without a vision encoder: pictures are refused."
    )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of `allowed_hosts`, one by one."""
        return access.parts(self.allowed_hosts)

    @property
    def web_origins(self) -> tuple[str, ...]:
        """The origins, one by one, as browsers write them: without a slash at the end."""
        return tuple(origin.rstrip("/") for origin in access.parts(self.cors_allow_origins))
