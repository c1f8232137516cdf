"""Settings of the vision encoder."""

from typing import ClassVar

from pydantic import Field

from shared.settings import NpuDeviceSettings, ProfileSettings, ServiceSettings


class VisionEncoderSettings(NpuDeviceSettings, ProfileSettings, ServiceSettings):
    """Flags `--encoder-cache-bytes` and so on; variables `TESSERA_VISION_ENCODER_ENCODER_CACHE_BYTES` and so on."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_VISION_ENCODER_", "TESSERA_")

    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads of the tower on a CPU; 0 is one for each core within the quota.",
    )
    encoder_cache_bytes: int = Field(
        256 << 20,
        ge=1,
        description="Embeddings kept for repeated images and waiting requests, in bytes.",
    )
    max_batch_patches: int = Field(
        0,
        ge=0,
        description="Patches that the tower takes at a time; 0 is 1024 on a CPU, elsewhere 16384 or what fits into the"
        " device's memory. One image always runs, however large.",
    )
    encoder_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Largest share of an accelerator's memory for the tower's weights and batches; `tessera serve`"
        " gives 0.15 where a decoder computes on the same NPU.",
    )
