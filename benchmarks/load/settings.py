"""Settings of `tessera bench serve`. Flags have the names of `vllm bench serve` where they mean the same."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator
from pydantic_settings import CliToggleFlag

from benchmarks.load.objective import Objective
from services.launcher.client_settings import TlsClientSettings

_SIZE = r"^[1-9]\d{0,3}x[1-9]\d{0,3}$"


class BenchSettings(TlsClientSettings):
    """Load on a server, and what is reported of it."""

    # Not TESSERA_ alone: TESSERA_MODEL is a folder, which means nothing to a client.
    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_BENCH_",)

    base_url: str = Field(
        "http://127.0.0.1:8000", description="Root of the server, with or without /v1."
    )
    backend: Literal["openai", "openai-chat"] = Field(
        "openai", description="openai asks /v1/completions, openai-chat /v1/chat/completions."
    )
    model: str = Field("", description="The served model; the only one unless given.")
    api_key: str = Field(
        "", description="The server's key, if it has one; better in TESSERA_BENCH_API_KEY."
    )
    extra_body: str = Field("", description="JSON object: more fields for every request.")
    temperature: float = Field(0.0, ge=0, le=2, description="0 always takes the likeliest token.")
    request_timeout: float = Field(
        600.0, gt=0, description="Seconds after which a request has failed."
    )

    num_prompts: int = Field(100, ge=1, description="Requests that are measured.")
    num_warmups: int = Field(1, ge=0, description="Requests before that, not measured.")
    request_rate: float = Field(
        float("inf"), gt=0, description="Requests a second; inf sends all at once."
    )
    arrivals: Literal["poisson", "constant"] = Field(
        "poisson", description="How requests of a finite rate are spaced."
    )
    burstiness: float = Field(
        1.0, gt=0, description="Shape of the gamma distribution of gaps: below 1 comes in bursts."
    )
    max_concurrency: int | None = Field(
        None,
        ge=1,
        validation_alias=AliasChoices("max_concurrency", "concurrency"),
        description="Requests under way at once; the next one waits for one of them to end.",
    )

    dataset_path: Path | None = Field(
        None, description="JSONL file of requests to send instead of random ones."
    )
    random_input_len: int = Field(
        512, ge=1, description="Tokens of a random prompt, the shared prefix not counted."
    )
    random_output_len: int = Field(
        64,
        ge=1,
        validation_alias=AliasChoices("random_output_len", "output_len"),
        description="Tokens of an answer.",
    )
    random_range_ratio: float = Field(
        0.0, ge=0, lt=1, description="Both lengths are drawn from length * (1 +- ratio)."
    )
    random_prefix_len: int = Field(
        0,
        ge=0,
        validation_alias=AliasChoices("random_prefix_len", "shared_prefix_tokens"),
        description="Tokens that prompts begin with in common.",
    )
    num_prefixes: int = Field(1, ge=1, description="Different shared prefixes, used in turn.")
    prompts: Literal["auto", "ids", "words"] = Field(
        "auto",
        description="ids sends token ids (completions alone); words sends text of common words.",
    )
    vocab_size: int = Field(
        250, ge=32, description="Random token ids are drawn from 10 up to this, the last excluded."
    )
    tokenizer: Path | None = Field(
        None,
        description="Checkpoint folder or tokenizer.json: makes the length of a prompt of words exact.",
    )
    ignore_eos: bool | None = Field(
        None, description="Goes on past the end of sequence; on for random prompts unless given."
    )

    images: int = Field(0, ge=0, le=64, description="Pictures in every request (chat alone).")
    image_size: str = Field("336x336", pattern=_SIZE, description="Their size in pixels, WxH.")
    image_format: Literal["jpeg", "png"] = Field("jpeg", description="How pictures are encoded.")
    repeat_images: bool = Field(
        False, description="The same pictures in every request instead of new ones."
    )

    seed: int = Field(0, ge=0, description="Equal seeds send equal requests at equal times.")
    return_token_ids: bool = Field(
        True, description="Asks for token ids in the stream, which makes counts exact."
    )
    goodput: list[str] = Field(
        [],
        validation_alias=AliasChoices("goodput", "slo"),
        description="Service level, in ms: ttft:500,tpot:50 (also itl, e2el). May be repeated.",
    )

    output: Path | None = Field(None, description="File for the result as JSON.")
    save_result: bool = Field(False, description="Writes the result to a file with a name of ours.")
    result_dir: Path = Field(Path("."), description="Folder of that file.")
    save_detailed: bool = Field(False, description="Adds every request to the JSON.")
    label: str = Field("", description="A word for the result, written to the JSON.")
    disable_tqdm: CliToggleFlag[bool] = Field(
        False,
        validation_alias=AliasChoices("disable_tqdm", "no_progress"),
        description="Shows no progress bar.",
    )

    @field_validator("goodput")
    @classmethod
    def _objectives_are_known(cls, value: list[str]) -> list[str]:
        for text in value:
            Objective.parse(text)
        return value

    @model_validator(mode="after")
    def _fields_go_together(self) -> "BenchSettings":
        if self.images and self.backend != "openai-chat":
            raise ValueError("pictures need --backend openai-chat")
        if self.prompts == "ids" and self.backend != "openai":
            raise ValueError("a conversation has no token ids: --prompts words")
        if self.images and self.dataset_path:
            raise ValueError("--images goes with random prompts, not with --dataset-path")
        return self

    @property
    def endpoint(self) -> str:
        """Path of the requests."""
        return "/v1/completions" if self.backend == "openai" else "/v1/chat/completions"

    @property
    def objectives(self) -> list[Objective]:
        """What a request must keep to count for goodput."""
        return [Objective.parse(text) for text in self.goodput]

    @property
    def goes_on_past_eos(self) -> bool:
        """Whether answers have exactly the length that was asked for."""
        return self.dataset_path is None if self.ignore_eos is None else self.ignore_eos

    @property
    def image_width_height(self) -> tuple[int, int]:
        """Width and height of a picture in pixels."""
        width, _, height = self.image_size.partition("x")
        return int(width), int(height)
