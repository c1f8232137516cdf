"""What the gateway can be told."""

from typing import ClassVar

from pydantic import Field

from shared.settings import RoomSettings


class GatewaySettings(RoomSettings):
    """The public doors. Flags have vLLM's names where they mean the same."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_GATEWAY_", "TESSERA_")

    host: str = Field("127.0.0.1", description="Address of the REST and gRPC doors.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the REST door; 0 takes any.")
    grpc_port: int = Field(8001, ge=0, le=65535, description="Port of the gRPC door; 0 takes any.")
    api_key: str = Field(
        "", description="Keys, separated by commas, of which every request must carry one."
    )
    cors_allow_origins: str = Field(
        "",
        description="Origins, separated by commas, whose web pages may call the REST door; * is any.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of prompt and answer; the checkpoint's length unless given."
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, le=1 << 30, description="Largest request body; a larger one is a 413."
    )
    max_waiting_requests: int = Field(
        1024, ge=1, description="Requests in all (preparing, waiting, running) before a 429."
    )
    max_waiting_tokens: int = Field(
        4 << 20, ge=1, description="Tokens that all those may cost together before a 429."
    )
    tenant_weights: str = Field(
        "",
        description="Shares under load: key:<API key>=4,user:<name>=0.5; who is not named has 1.",
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
        0.0, ge=0, le=86400, description="Seconds that a request may wait to be taken; 0 is any."
    )
    first_token_timeout: float = Field(
        0.0, ge=0, le=86400, description="Seconds from arrival to the first token; 0 is any."
    )
    request_timeout: float = Field(
        0.0, ge=0, le=86400, description="Seconds from arrival to the end; 0 is any."
    )
    shutdown_timeout: float = Field(
        30.0, ge=0, le=86400, description="Seconds that open answers may run on after SIGTERM."
    )

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, one by one."""
        return _parts(self.api_key)

    @property
    def web_origins(self) -> tuple[str, ...]:
        """The origins, one by one, as browsers write them: without a slash at the end."""
        return tuple(origin.rstrip("/") for origin in _parts(self.cors_allow_origins))


def _parts(listed: str) -> tuple[str, ...]:
    return tuple(part for piece in listed.split(",") if (part := piece.strip()))
