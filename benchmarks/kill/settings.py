"""Settings of `tessera bench kill`."""

from pathlib import Path
from typing import ClassVar

from pydantic import AliasChoices, Field, field_validator

from benchmarks.kill.overload import OVERLOADS
from benchmarks.kill.victims import EVERY_ROOM, Victim
from services.launcher.client_settings import TlsClientSettings
from shared.settings import state_home

_SIZE = r"^[1-9]\d{0,3}x[1-9]\d{0,3}$"


class KillSettings(TlsClientSettings):
    """Which processes are killed how often, under what load, and where the system is."""

    # Not TESSERA_ alone: TESSERA_MODEL is a folder, which means nothing to a client.
    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_KILL_",)
    COMMON_VARIABLES: ClassVar[frozenset[str]] = frozenset({"api_key"})

    victims: str = Field(
        ",".join(EVERY_ROOM),
        validation_alias=AliasChoices("victims", "kill"),
        description="Services, separated by commas: gateway, preprocess, encoder, scheduler, decoder, redis; "
        "decoder:stop is frozen instead of killed, decoder:term is drained, decoder:full-disk is killed while the "
        "state folder's disk is full, of decoder:rank another rank is killed, decoder+scheduler are killed together; "
        "or loads that no client should make: "
        f"{', '.join(OVERLOADS)}.",
    )
    times: int = Field(3, ge=1, le=1000, description="How often each is killed.")
    freeze_s: float = Field(
        3.0,
        gt=0,
        le=60,
        description="Seconds that a frozen process stands, a disk is full, or a load goes on.",
    )
    patience: float = Field(
        60.0, ge=1, le=600, description="Seconds without an event after which a stream is lost."
    )

    num_requests: int = Field(
        200,
        ge=1,
        validation_alias=AliasChoices("num_requests", "requests", "num_prompts"),
        description="Streams in all; each kill has an equal share of them under way.",
    )
    images: float = Field(0.5, ge=0, le=1, description="Share of requests with a picture.")
    image_size: str = Field("336x336", pattern=_SIZE, description="Their size in pixels, WxH.")
    sampled: float = Field(
        0.25, ge=0, le=1, description="Share that is sampled with a seed, two choices each."
    )
    formed: float = Field(
        0.2, ge=0, le=1, description="Share whose answers are held to a JSON schema."
    )
    calling: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Share that has to call a tool, where it is known how the model writes calls (of the launched"
        " system --serve '--tool-call-parser hermes').",
    )
    input_len: int = Field(48, ge=1, description="Words of a prompt.")
    output_len: int = Field(
        384, ge=1, description="Tokens of an answer, half as many and up to that."
    )
    tenants: int = Field(3, ge=1, le=100, description="Different users who ask.")
    seed: int = Field(0, ge=0, description="Equal seeds send equal requests and draw equal kills.")
    expect_equal: bool = Field(
        True, description="Fails where tokens differ from the undisturbed run: float32 on CPUs."
    )
    most_gap: float = Field(
        0.0, ge=0, description="Fails where the P99 of the gaps of a victim is longer, in seconds."
    )

    poison: bool = Field(
        False,
        description="Then also kills the decoders each time that they compute one certain request, until it is ended.",
    )

    state_dir: Path | None = Field(
        None, description="State folder of the `tessera serve` whose processes are meant."
    )
    port: int = Field(8000, ge=1, le=65535, description="Its port, where it has a folder by that.")
    launch: bool = Field(False, description="Starts a `tessera serve` for this, and ends it.")
    serve: str = Field("", description="Flags of that `tessera serve`, in one string.")
    compose: bool = Field(
        False, description="Kills containers of the project of `docker compose` in this folder."
    )
    project: str = Field("", description="Name of that project, if it is not the folder's.")
    base_url: str = Field(
        "",
        description="Gateways, separated by commas; those of the system that is found unless given.",
    )
    api_key: str = Field(
        "", description="The server's key, if it has one; TESSERA_API_KEY unless given."
    )
    output: Path | None = Field(None, description="File for the result as JSON.")

    @field_validator("victims")
    @classmethod
    def _victims_are_known(cls, value: str) -> str:
        Victim.parse_all(value)
        return value

    @property
    def plan_of_victims(self) -> list[Victim]:
        """Those that are named, each once."""
        return Victim.parse_all(self.victims)

    @property
    def urls(self) -> list[str]:
        """The gateways that were named."""
        return [url for part in self.base_url.split(",") if (url := part.strip())]

    @property
    def state_folder(self) -> Path:
        """Where the system that is meant keeps its state."""
        return (self.state_dir or state_home() / "tessera" / str(self.port)).absolute()

    @property
    def image_width_height(self) -> tuple[int, int]:
        """Width and height of a picture in pixels."""
        width, _, height = self.image_size.partition("x")
        return int(width), int(height)
