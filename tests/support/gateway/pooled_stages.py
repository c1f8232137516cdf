"""Stages of servers for vectors, classes and scores."""

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.queue.token_log import decode_tokens
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.support.gateway.stage import Stage, open_stage
from tests.support.tokenizers import save

WIDTH = 8
Opened = AbstractAsyncContextManager[Stage]


def numbers_of(spec: RequestSpec) -> list[float]:
    """A vector that differs with the prompt."""
    prompt = decode_tokens(spec.prompt)
    return [float(sum(prompt) % (place + 7)) - 2 for place in range(spec.pooling.width)]


def embeds_of(redis_url: str, folder: Path, tokenizer: Tokenizer) -> Opened:
    """A server of vectors that may be cut to 4 numbers, of three prompts at a time."""
    _write_folder(folder, tokenizer, "Qwen3ForCausalLM", matryoshka_dimensions=[4])
    prompts = {"prompts": {"query": "Q: ", "document": "D: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return open_stage(redis_url, folder, tokenizer, task="embed", max_prompts=3)


def classifies_of(redis_url: str, folder: Path, tokenizer: Tokenizer) -> Opened:
    """A classifier of two labels."""
    labels = {"0": "bad", "1": "good"}
    _write_folder(folder, tokenizer, "Qwen3ForSequenceClassification", id2label=labels)
    return open_stage(redis_url, folder, tokenizer)


def scores_of(redis_url: str, folder: Path, tokenizer: Tokenizer) -> Opened:
    """A classifier of one label."""
    _write_folder(folder, tokenizer, "Qwen3ForSequenceClassification", num_labels=1)
    return open_stage(redis_url, folder, tokenizer)


def _write_folder(folder: Path, tokenizer: Tokenizer, architecture: str, **config: Any) -> None:
    folder.mkdir()
    save(tokenizer, folder)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    heads["vocab_size"] = tokenizer.get_vocab_size()
    names = {"architectures": [architecture], "model_type": "qwen3"}
    content = {**names, **sizes, **heads, "max_position_embeddings": 64, **config}
    (folder / "config.json").write_text(json.dumps(content))
