"""Settings of preprocess."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from services.preprocess.content_format import ContentFormat
from services.preprocess.limit_setting import parse_limits
from shared.hardware import processors
from shared.settings import ChatTemplateSettings, ModelLengthSettings, ServiceSettings


class PreprocessOptions(ChatTemplateSettings, ModelLengthSettings):
    """Settings of preprocess that `tessera serve` has too."""

    GROUP: ClassVar[str] = "prompts and media"

    chat_template_content_format: ContentFormat = Field(
        ContentFormat.AUTO,
        description="What a chat template is given as a message's content: string, openai (a list of parts), or auto,"
        " which is what the template takes.",
    )
    language_model_only: bool = Field(False, description="Refuses pictures and videos.")
    limit_mm_per_prompt: str = Field(
        "image=16,video=16",
        description="Largest numbers of images and of videos in a prompt: image=16,video=2, or as JSON;"
        " one number is for each of both.",
    )
    max_window_size: int | None = Field(
        None,
        ge=0,
        description="Tokens below which the prompt of a conversation is kept: its system message and the newest whole"
        " turns that fit are shown to the model. 0 is no window; that of the checkpoint's generation_config.json unless"
        " given.",
    )
    max_video_frames: int = Field(
        128, ge=1, le=1024, description="Largest number of frames of a video that a model is shown."
    )
    allowed_media_domains: str = Field(
        "",
        description="Hosts that media may come from, comma-separated; .example.org has subdomains.",
    )
    allow_private_media: bool = Field(
        False, description="Also fetches media from private networks and this machine. Dangerous."
    )

    allowed_local_media_path: Path | None = Field(
        None,
        description="Folder of this machine's files that requests may name as media (file: URLs, and paths). For"
        " clients that may see all that lies below it.",
    )
    mindie_shm: Path | None = Field(
        None,
        description="Folder for lists of blocks of shared memory: prompts of token ids may name pictures in shared"
        " memory as MindIE-LLM does, and /tokenize writes them (shm_name_save_path). For clients that are trusted:"
        " they read and remove blocks psm_* of this user.",
    )

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _is_limit(cls, text: str) -> str:
        parse_limits(text)
        return text


class PreprocessSettings(PreprocessOptions, ServiceSettings):
    """Flags `--max-image-bytes` and so on; variables `TESSERA_PREPROCESS_MAX_IMAGE_BYTES` and so on."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_PREPROCESS_", "TESSERA_")

    trust_request_chat_template: bool = Field(
        False, description="Renders chat templates that come with a request."
    )
    max_video_bytes: int = Field(
        48 << 20, ge=1, le=256 << 20, description="Largest video file in bytes."
    )
    max_video_pixels: int = Field(
        400_000_000,
        ge=16,
        description="Largest number of pixels of the frames of a video that a model is shown.",
    )
    max_image_bytes: int = Field(
        20 << 20, ge=1, le=48 << 20, description="Largest image file in bytes."
    )
    max_image_pixels: int = Field(
        50_000_000, ge=16, description="Largest image in pixels, checked before it is decoded."
    )
    image_timeout_s: float = Field(
        20.0, gt=0, description="Longest time in seconds that decoding one image or video may take."
    )
    image_memory_bytes: int = Field(
        640 << 20,
        ge=64 << 20,
        description="Most memory that decoding one image or video may take, in bytes.",
    )
    media_budget_s: float = Field(
        60.0,
        ge=0,
        description="Seconds of processor time a minute for each tenant's media that cannot be used or"
        " take long; 0 is no limit.",
    )
    media_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that decode images of one tenant; 0 is one for each two cores within the"
        " quota. One more serves the others meanwhile.",
    )
    pixel_cache_bytes: int = Field(
        256 << 20, ge=0, description="Pixel values that are kept for repeated images, in bytes."
    )
    media_store_bytes: int = Field(
        1 << 30, ge=1, description="Raw media of unfinished requests kept in Redis, in bytes."
    )
    media_timeout_s: float = Field(
        10.0, gt=0, description="Longest time in seconds that fetching one file may take."
    )

    @property
    def media_domains(self) -> tuple[str, ...]:
        """The hosts that media may come from; empty is all."""
        names = (name.strip().lower() for name in self.allowed_media_domains.split(","))
        return tuple(name.removeprefix("*") for name in names if name)

    @property
    def worker_count(self) -> int:
        """Processes that decode images."""
        return self.media_workers or max(1, processors.threads() // 2)
