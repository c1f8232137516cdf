"""Small random checkpoints of families that the code of transformers runs, as transformers itself writes them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from torch import nn
from transformers import PreTrainedConfig

from services.decoder.models.generic.linears.taken_linear import TakenLinear
from tests.support.checkpoints.options import randomise, tokenizer

_SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_NO_HEAD_SIZE = {key: value for key, value in _SIZES.items() if key != "head_dim"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Keys and values are made of one small row for each token; keys are larger than values.
_LATENT = {
    **_NO_HEAD_SIZE,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GENERIC_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma2": ("Gemma2", {**_SIZES, "sliding_window": 24, "query_pre_attn_scalar": 16,
                          "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gpt_oss": ("GptOss", {**_SIZES, **_EXPERTS, "sliding_window": 24}),
    "cohere2": ("Cohere2", {**_NO_HEAD_SIZE, "sliding_window": 24}),
    "llama4": ("Llama4Text", {**_SIZES, **_EXPERTS, "intermediate_size_mlp": 96,
                              "attention_chunk_size": 32, "floor_scale": 16}),
    "mixtral": ("Mixtral", {**_SIZES, **_EXPERTS, "sliding_window": None}),
    "qwen3_moe": ("Qwen3Moe", {**_SIZES, "moe_intermediate_size": 32, "num_experts": 8,
                               "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "n_group": 1}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "n_group": 2}),
}  # fmt: skip
# Windows with soft caps, sinks with experts, chunks with rows that depend on the batch, latent attention.
_BY_DEFAULT = ("gemma2", "gpt_oss", "llama4", "deepseek_v3")


def each(names: Iterable[str] = GENERIC_MODELS) -> list[ParameterSet]:
    """Parameters of a test: these families, those of GENERIC_MODELS that repeat others in `make test-full` alone."""
    repeating = GENERIC_MODELS.keys() - set(_BY_DEFAULT)
    return [
        pytest.param(name, marks=pytest.mark.full if name in repeating else ()) for name in names
    ]


def make_generic_checkpoint(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Writes weights, configuration and tokenizer of one of GENERIC_MODELS; `changes` are keys of the configuration."""
    name, sizes = GENERIC_MODELS[family]
    config: PreTrainedConfig = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)  # of what `randomise` leaves as the class makes it
        model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed=0)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def parameters(model: nn.Module, shared: bool = False) -> dict[str, int]:
    """How many elements each parameter has, also those that linear layers of a generic decoder are still to read;
    `shared`: one by all its names."""
    taken = {
        f"{name}.weight": part.out_features * part.in_features
        for name, part in model.named_modules()
        if type(part) is TakenLinear
    }
    own = model.named_parameters(remove_duplicate=not shared)
    return taken | {name: values.numel() for name, values in own}
