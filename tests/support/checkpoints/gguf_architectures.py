"""Small random models of many architectures, and GGUF files of them as llama.cpp's converter writes them: names by the
library `gguf`, tensors and keys changed as the converter changes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.support.checkpoints.gguf_files import quantized

VOCABULARY, _LAYERS = 160, 2
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD = 16
Tensors = dict[str, Tensor]
Keys = dict[str, Any]
Change = Callable[[Tensors, PreTrainedConfig], Tensors]


@dataclass(frozen=True)
class Made:
    """`config`: the name of its class, and what it has beside sizes; `keys`: of the file, behind the architecture's
    name, of the configuration; `change`: what the converter does with the tensors of transformers."""

    arch: MODEL_ARCH
    config: str
    said: Mapping[str, Any]
    keys: Callable[[PreTrainedConfig], Keys] = lambda config: {}
    change: Change = lambda tensors, config: tensors
    extra: Mapping[str, list[float]] = field(default_factory=dict)


def _turned(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    """Rows of queries and keys in the order of ggml's rotation."""

    def turn(name: str, rows: Tensor) -> Tensor:
        heads = {
            "q_proj": config.num_attention_heads,
            "k_proj": config.num_key_value_heads,
        }.get(name.split(".")[-2])
        if heads is None:
            return rows
        by_head: Tensor = rows.unflatten(0, (heads, 2, -1))
        return by_head.transpose(1, 2).reshape(rows.shape)

    return {name: turn(name, rows) for name, rows in tensors.items()}


def _shifted(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    return {
        name: rows + 1 if name.endswith("norm.weight") else rows for name, rows in tensors.items()
    }


def _stacked(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    """The experts of a layer in one tensor each of gates, of what these gate, and of outputs."""
    found: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, rows in tensors.items():
        stem, inside, rest = name.partition(".experts.")
        if not inside:
            found[name] = rows
            continue
        number, part = rest.split(".", 1)
        experts.setdefault(f"{stem}.experts.{part}", {})[int(number)] = rows
    return found | {
        name: torch.stack([rows[i] for i in range(len(rows))]) for name, rows in experts.items()
    }


def _mixtral(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    return _turned(_stacked(tensors, config), config)


def _chatglm(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    """Queries, keys and values in one matrix, as ChatGLM had them."""
    found: Tensors = {}
    for name, rows in tensors.items():
        if "_proj" not in name or "self_attn.o_proj" in name or "mlp" in name:
            found[name] = rows
        elif ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return found


def _neox(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    """All queries before all keys; of transformers' each head has its own together."""

    def apart(name: str, rows: Tensor) -> Tensor:
        if "query_key_value" not in name:
            return rows
        by_head = rows.unflatten(0, (config.num_attention_heads, 3, -1))
        return torch.cat([by_head[:, part].flatten(0, 1) for part in range(3)])

    return {name: apart(name, rows) for name, rows in tensors.items()}


def _norms_stacked(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    """The norms of a layer's heads in one tensor."""
    found = {name: rows for name, rows in tensors.items() if ".norms." not in name}
    for name in tensors:
        stem, inside, rest = name.partition(".norms.")
        if inside and rest == "0.weight":
            heads = sum(other.startswith(f"{stem}.norms.") for other in tensors)
            parts = [tensors[f"{stem}.norms.{head}.weight"] for head in range(heads)]
            found[f"{stem}.weight"] = torch.stack(parts)
    return found


def _gemma2(config: PreTrainedConfig) -> Keys:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _experts(config: PreTrainedConfig) -> Keys:
    inner = getattr(config, "moe_intermediate_size", None)
    return {
        "expert_count": getattr(config, "num_local_experts", None) or config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        **({"expert_feed_forward_length": inner} if inner else {}),
    }


def _qwen2_moe(config: PreTrainedConfig) -> Keys:
    shared = config.shared_expert_intermediate_size
    return _experts(config) | {"expert_shared_feed_forward_length": shared}


def _rotated(part: float) -> Callable[[PreTrainedConfig], Keys]:
    return lambda config: {"rope.dimension_count": int(_HEAD * part)}


def _granite(config: PreTrainedConfig) -> Keys:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _long(config: PreTrainedConfig) -> Keys:
    return {
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": config.rope_parameters["attention_factor"],
    }


_LONG, _SHORT = [1 + i / 4 for i in range(8)], [1 + i / 16 for i in range(8)]
_SHARE = {"head_dim": _HEAD}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MADE: Mapping[str, Made] = {
    "mixtral": Made(
        MODEL_ARCH.LLAMA,
        "MixtralConfig",
        {"num_local_experts": 4, "sliding_window": None},
        _experts,
        _mixtral,
    ),
    "gemma": Made(MODEL_ARCH.GEMMA, "GemmaConfig", _SHARE, change=_shifted),
    "gemma2": Made(
        MODEL_ARCH.GEMMA2,
        "Gemma2Config",
        _SHARE
        | {
            "sliding_window": 8,
            "query_pre_attn_scalar": _HEAD,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        _gemma2,
        _shifted,
    ),
    "gemma3": Made(
        MODEL_ARCH.GEMMA3,
        "Gemma3TextConfig",
        _SHARE | {"sliding_window": 8, "query_pre_attn_scalar": _HEAD},
        lambda config: {"attention.sliding_window": 8, "rope.freq_base": 1e6},
        _shifted,
    ),
    "phi3": Made(
        MODEL_ARCH.PHI3,
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "long_factor": _LONG,
                "short_factor": _SHORT,
                "attention_factor": 1.25,
                "original_max_position_embeddings": 64,
            },
        },
        _long,
        extra={"rope_factors_long.weight": _LONG, "rope_factors_short.weight": _SHORT},
    ),
    "qwen2moe": Made(
        MODEL_ARCH.QWEN2MOE,
        "Qwen2MoeConfig",
        _MOE | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
        _qwen2_moe,
        _stacked,
    ),
    "qwen3moe": Made(
        MODEL_ARCH.QWEN3MOE,
        "Qwen3MoeConfig",
        _SHARE | _MOE | {"norm_topk_prob": True, "decoder_sparse_step": 1},
        _experts,
        _stacked,
    ),
    "chatglm": Made(
        MODEL_ARCH.CHATGLM,
        "GlmConfig",
        _SHARE | {"attention_bias": True},
        _rotated(0.5),
        _chatglm,
    ),
    "glm4": Made(MODEL_ARCH.GLM4, "Glm4Config", _SHARE | {"attention_bias": True}, _rotated(0.5)),
    "granite": Made(
        MODEL_ARCH.GRANITE,
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        _granite,
        _turned,
    ),
    "olmo2": Made(MODEL_ARCH.OLMO2, "Olmo2Config", {}),
    "starcoder2": Made(
        MODEL_ARCH.STARCODER2, "Starcoder2Config", {"sliding_window": None, "use_bias": True}
    ),
    "stablelm": Made(
        MODEL_ARCH.STABLELM,
        "StableLmConfig",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
        _rotated(0.25),
    ),
    "stablelm of 12B": Made(
        MODEL_ARCH.STABLELM,
        "StableLmConfig",
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
        _rotated(0.25),
        _norms_stacked,
    ),
    "gptneox": Made(
        MODEL_ARCH.GPTNEOX,
        "GPTNeoXConfig",
        {"num_key_value_heads": 4, "rotary_pct": 0.25},
        _rotated(0.25),
        _neox,
    ),
    "command-r": Made(
        MODEL_ARCH.COMMAND_R,
        "CohereConfig",
        {"logit_scale": 0.25},
        lambda config: {"logit_scale": 0.25},
    ),
}


def make_numbers(folder: Path, name: str) -> Path:
    """A checkpoint of transformers with random weights."""
    made = MADE[name]
    config = getattr(transformers, made.config)(**_SIZES | dict(made.said))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn_like(parameter)
            spread = 0.2 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(drawn * spread + (parameter if parameter.ndim == 1 else 0))
    model.save_pretrained(folder)
    return folder


def write_numbers(
    path: Path,
    folder: Path,
    name: str,
    tensors: Tensors,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A file of the checkpoint in `folder`, of this name in `MADE`, whose matrices are of one type. It has no
    tokenizer."""
    made = MADE[name]
    config = transformers.AutoConfig.from_pretrained(folder)
    called = gguf.MODEL_ARCH_NAMES[made.arch]
    writer = GGUFWriter(path, called)
    for key, value in (_keys(config) | made.keys(config)).items():
        full = f"{called}.{key}"
        writer.add_float32(full, value) if isinstance(value, float) else writer.add_uint32(
            full, value
        )
    names = gguf.get_tensor_name_map(made.arch, _LAYERS)
    for own, rows in made.change(tensors, config).items():
        stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert stored is not None, own
        if stored == "output.weight" and config.tie_word_embeddings:
            continue
        numbers = rows.float().contiguous().numpy()
        if rows.ndim > 1 and min(rows.shape[-2:]) > 4 and kind is not GGMLQuantizationType.F32:
            blocks = quantized(numbers.reshape(-1, rows.shape[-1]), kind)
            writer.add_tensor(stored, blocks.reshape(*rows.shape[:-1], -1), raw_dtype=kind)
        else:
            writer.add_tensor(stored, numbers.squeeze())
    for stored, factors in made.extra.items():
        writer.add_tensor(stored, torch.tensor(factors).numpy())
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: PreTrainedConfig) -> Keys:
    rope = config.rope_parameters
    theta = rope.get("rope_theta") or rope["full_attention"]["rope_theta"]
    size = getattr(config, "head_dim", None) or _HEAD
    epsilon = {
        key: getattr(config, own)
        for own, key in (
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("layer_norm_eps", "attention.layer_norm_epsilon"),
            ("norm_epsilon", "attention.layer_norm_epsilon"),
        )
        if getattr(config, own, None) is not None
    }
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": _LAYERS,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None)
        or config.num_attention_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(theta),
        **epsilon,
    }
