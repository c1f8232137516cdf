"""Text models that are drawn and written shard by shard: never more than one shard of them is in memory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config

from benchmarks.checkpoints.words import END, END_OF_TEXT, make_tokenizer, save_tokenizer

_DEVIATION = 0.02  # of weights, as Qwen2's class draws them
_LAYERS_OF_A_SHARD = 2


def write_qwen2(folder: Path, config: Qwen2Config) -> None:
    """A checkpoint of `config`'s shape in bfloat16, the same for equal shapes, its output matrix not the embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    words = make_tokenizer(config.vocab_size)
    start, end = words.convert_tokens_to_ids([END_OF_TEXT, END])
    ids = {"bos_token_id": start, "pad_token_id": start, "eos_token_id": end}
    config.update(
        {**ids, "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
        | {"tie_word_embeddings": False}
    )
    generator = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    total = 0
    shards = list(_shards(config))
    for number, sizes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _draw(name, size, generator) for name, size in sizes.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    GenerationConfig(**ids, do_sample=False).save_pretrained(folder)
    save_tokenizer(words, folder)


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, _DEVIATION, generator=generator)


def _shards(config: Qwen2Config) -> Iterator[Mapping[str, tuple[int, ...]]]:
    """Names and shapes of each shard's tensors."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield {"model.embed_tokens.weight": (vocabulary, hidden)}
    for first in range(0, config.num_hidden_layers, _LAYERS_OF_A_SHARD):
        layers = range(first, min(first + _LAYERS_OF_A_SHARD, config.num_hidden_layers))
        yield {name: size for layer in layers for name, size in _layer(config, layer).items()}
    yield {"lm_head.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}


def _layer(config: Qwen2Config, number: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {f"model.layers.{number}.{name}": size for name, size in sizes.items()}
