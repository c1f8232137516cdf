"""Settings of the decoder. Names are vLLM's where the meaning is the same."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from shared.kv_cache_dtype import KvCacheDtype
from shared.model_backends import ModelBackend
from shared.settings import (
    ComputeSettings,
    LoraSettings,
    ModelLengthSettings,
    NpuDeviceSettings,
    ProfileSettings,
    ServiceSettings,
)


class DecoderOptions(ComputeSettings, LoraSettings, ModelLengthSettings, ProfileSettings):
    """Settings of the decoder that `tessera serve` has too. None and "auto" mean: chosen at start, and logged."""

    GROUP: ClassVar[str] = "decoder"

    max_num_seqs: int = Field(
        256, ge=1, le=65_536, description="Sequences that one decoder runs at once."
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that one decoder computes in a step, a seventeenth less while others generate; 272 on the"
        " CPU, 2176 on cuda and npu unless given.",
    )
    max_loras: int = Field(
        8,
        ge=1,
        le=1024,
        description="With --allowed-adapter-dir: how many of the adapters below it a decoder has at a time, in memory"
        " that is set aside for them. It reads others when requests need them, in the place of those used longest ago.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes, the ranks, that compute one decoder's model together, each its part of every layer: on"
        " accelerators each on one of its own, on the CPU each with its share of the cores.",
    )
    model_backend: ModelBackend = Field(
        ModelBackend.AUTO,
        description="Code that runs the model's layers: native is this project's; transformers is the model's own"
        " class, over this project's KV cache; auto is native for the families that have it, else transformers.",
    )
    quantization: Literal[
        "auto",
        "none",
        "int8",
        "int8g128",
        "int8-fast",
        "int4",
        "int4g32",
        "int4g64",
        "int4g128",
        "int4g256",
    ] = Field(
        "auto",
        description="How the decoder's linear layers are quantized at loading, on the CPU and on NPUs: auto leaves"
        " them as they are stored, none makes numbers of codes too, int8 has one scale for each output, int8g128 one"
        " for each 128 inputs; int4 one with a zero point for each 64 inputs, 32 in models below 1 billion parameters,"
        " or for as many as are named. Activations have 14 bits, on NPUs 16, and 8 with int8-fast, which has groups of"
        " 128 inputs, on NPUs one scale for each output. The output matrix always has int8. Layers that a checkpoint"
        " has as codes stay as they are unless this is none.",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        "auto",
        description="How keys and values of the KV cache are kept: auto, as the model computes; int8, on the CPU and"
        " on Ascend 910B, as codes of 8 bits with a scale for each token and head, so that 1.9 times as many tokens"
        " fit.",
    )
    trust_remote_code: bool = Field(
        False, description="Run model code that the checkpoint brings, where transformers has none."
    )
    skip_model_check: bool = Field(
        False,
        description="Do not compare a model that the code of transformers runs with its own forward at start, with"
        " pictures or without.",
    )
    num_host_blocks: int | None = Field(
        None,
        ge=0,
        description="Blocks in host memory for sequences that are swapped out; unless given as many as the cache"
        " has, in a tenth of the host memory that is free at most. On the CPU they take memory when first used; on an"
        " Ascend 310P there are none.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of KV cache for each decoder, with the state of its layers that keep some for each sequence;"
        " adapters (--max-loras) and graphs take their memory beside it;"
        " unless given the least of 4 GiB on a CPU (512 MiB for a model"
        " below 100 million parameters), what --gpu-memory-utilization allows, and what --max-num-seqs sequences of"
        " --max-model-len tokens take.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Largest share of a device's memory for the weights, steps and caches of all decoders, 0.9 unless"
        " given, and 0.75 where a vision encoder is started on the same NPU; on the CPU of the host memory that is free"
        " after loading, for steps and caches, 0.4 unless given.",
    )
    npu_reserved_memory: int | None = Field(
        None,
        ge=0,
        description="Bytes of an NPU's memory that each decoder leaves to workspaces of operators, graphs and"
        " communication; unless given 3 percent of all, 1 GiB at least.",
    )
    npu_forms: str = Field(
        "",
        description="Forms in which an NPU's operators are called, separated by commas: one that is named (TND, TND+1,"
        " BSND, NZ, NZ-host of attention; reshape_and_cache, scatter_pa, index_put of writing keys; grouped,"
        " grouped_nz, grouped_finalize of experts, gating_softmax of choosing them; weights_nz, see --npu-weights;"
        " reference) is taken untried, one with a minus sign in front never. Unless given each is tried at the first"
        " start, in a process of its own, and the first that gives what the reference gives is taken.",
    )
    npu_weights: Literal["nd", "nz", "auto"] = Field(
        "nd",
        description="How an NPU has the weights of linear layers: nd, in rows; nz, in the tiles that its matrix unit"
        " reads (FRACTAL_NZ), where a trial of their sizes gives the right products; auto, where these are faster too."
        " A 310P has tiles.",
    )
    speculation: Literal["auto", "off", "suffix"] = Field(
        "auto",
        description="Drafts, guesses of a sequence's next tokens that a step runs beside its newest one; those that are"
        " what is then chosen count, so answers are the same and repetitive ones come faster: suffix, what followed the"
        " same tokens earlier, in the prompt, the answer, or answers that share its prefix cache; off; auto, suffix"
        " where a token's bits depend on its own sequence alone, else off. How many there are follows from what steps"
        " were measured to take and how many drafts were right: often none.",
    )
    speculation_tokens: int = Field(
        3,
        ge=1,
        le=16,
        description="Most drafts of a sequence in a step; bfloat16 on the CPU computes up to four tokens fast.",
    )
    graphs: Literal["off", "on", "auto"] = Field(
        "auto",
        description="Steps that only generate are captured as graphs at the start and replayed, in place of a call for"
        " each operation: off; on, where a check at the start finds that they compute the same; auto, where they are"
        " measured to be faster too. On npu, but not on a 310P, and on cuda where one rank computes.",
    )

    @property
    def computation(self) -> dict[str, Any]:
        """How the model is to be computed, as `services.families.check` takes it."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "backend": self.model_backend,
            "quantization": self.quantization,
            "kv_cache": self.kv_cache_dtype,
            "trust_remote_code": self.trust_remote_code,
        }


class DecoderSettings(DecoderOptions, NpuDeviceSettings, ServiceSettings):
    """Flags, and `TESSERA_DECODER_*` in the environment."""

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_DECODER_", "TESSERA_")

    block_size: int = Field(
        0,
        ge=0,
        le=1024,
        description="Tokens in a block of the cache; the device's own unless given, which on npu is the only one, 128.",
    )
    memory_sharers: int = Field(
        1, ge=1, le=1024, description="Decoders among which --gpu-memory-utilization is divided."
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
