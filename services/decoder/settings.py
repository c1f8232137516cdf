"""Settings of the decoder, under the names vLLM users know."""

from typing import ClassVar

from pydantic import Field

from shared.settings import ServiceSettings


class DecoderSettings(ServiceSettings):
    """Flags and `TESSERA_DECODER_*` variables. 0 and "auto" mean: chosen at start, and logged."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_DECODER_", "TESSERA_")

    device: str = Field(
        "auto", description="auto, cpu or cuda; auto is cuda where there is one, else cpu."
    )
    dtype: str = Field(
        "auto",
        pattern="^(auto|float32|bfloat16|float16)$",
        description="Element type of weights and cache. auto: bfloat16; on the CPU float32 for"
        " checkpoints stored so and for models under 100 million parameters.",
    )
    max_model_len: int = Field(
        0, ge=0, description="Most tokens of one sequence; the model's own limit unless given."
    )
    max_num_seqs: int = Field(256, ge=1, le=65_536, description="Most sequences known at a time.")
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="Most tokens in one step, a seventeenth less while others generate; 272 on the CPU, 2176 on cuda"
        " unless given.",
    )
    block_size: int = Field(
        0,
        ge=0,
        le=1024,
        description="Tokens in a block of the cache; the device's own unless given.",
    )
    kv_cache_memory_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of the cache; unless given the least of 4 GiB (512 MiB for a model below 100"
        " million parameters), what gpu_memory_utilization allows, and what max_num_seqs sequences of"
        " max_model_len tokens take.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Largest share of a CUDA device's memory for weights, steps and cache, 0.9 unless given;"
        " on the CPU of the host memory that is free after loading, for steps and cache, 0.4 unless given.",
    )
    memory_sharers: int = Field(
        1, ge=1, le=1024, description="Decoders among which that share is divided."
    )
    num_host_blocks: int | None = Field(
        None,
        ge=0,
        description="Blocks in host memory for sequences that are swapped out; unless given as many as the cache"
        " has, in a tenth of the host memory that is free at most. On the CPU they take memory when first used.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads that compute on the CPU; unless given one for each core within the quota, and 1 for a"
        " small model.",
    )
    embedding_cache_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Bytes of embeddings kept after their last use, for repeated media.",
    )
    shutdown_timeout: float = Field(
        5.0, ge=0, le=3600, description="Seconds to wait for sequences to leave after SIGTERM."
    )
