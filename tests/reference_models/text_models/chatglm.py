"""ChatGLM2, ChatGLM3 and GLM-4-9B-chat with the tensor names they were released with.

Assumption: query_key_value is all q, all k, all v, without `multi_query_attention` each head's q, k, v;
dense_h_to_4h is gate, up; pairs (2i, 2i + 1) of a head's first half rotate, with base 10000 * rope_ratio.
Assumption: prompts are `[gMASK]`, `sop` (GLM-4: `<sop>`), then for ChatGLM2 one text of rounds
numbered from 1, after that `<|role|>`, a newline and the text for each turn, then `<|assistant|>`.
Assumption: in ChatGLM3 the newline after a role and the text are encoded one by one, in GLM-4 together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.reference_models import words
from tests.reference_models.common import (
    Draw,
    Generated,
    Turn,
    attention,
    below,
    causal,
    greedy,
    linear,
    read_json,
    read_tensors,
    rms_norm,
    write_folder,
)
from tests.support.tokenizers import token_id

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def write_checkpoint(folder: Path, *, generation: int = 2, seed: int = 0, **changes: Any) -> Path:
    """A tiny checkpoint of generation 2, 3 or 4; `changes` of keys of config.json."""
    vocab_size = 520
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel" if generation < 4 else "ChatGLMForConditionalGeneration"],
        "padded_vocab_size": vocab_size,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "kv_channels": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "layernorm_epsilon": 1e-5 if generation < 4 else 1.5625e-07,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False,
        "original_rope": True,
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config |= ({"rope_ratio": 500} if generation == 4 else {}) | changes
    names = ["[gMASK]", "<sop>" if generation == 4 else "sop"]
    names += ROLES if generation > 2 else ()
    special = {name: vocab_size - 10 + place for place, name in enumerate(names)}
    make = words.byte_level_words if generation == 4 else words.sentencepiece_words
    tokenizer = make(special)
    tokenizer.post_processor = None
    if generation == 4:
        config["eos_token_id"] = [tokenizer.token_to_id("<|endoftext|>"), special["<|user|>"]]
    tensors, end = _draw(config, Draw(seed)), "<|endoftext|>" if generation == 4 else "</s>"
    return write_folder(folder, config, tensors, tokenizer, eos_token=end)


def _draw(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["ffn_hidden_size"]
    rows = config["num_attention_heads"] * config["kv_channels"]
    shared = "multi_query_group_num" if config["multi_query_attention"] else "num_attention_heads"
    groups = config[shared] * config["kv_channels"]
    table = random.weight(config["padded_vocab_size"], hidden)
    tensors = {"transformer.embedding.word_embeddings.weight": table}
    for layer in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{layer}."
        tensors |= random.norm(f"{name}input_layernorm", hidden, bias=False)
        tensors |= random.norm(f"{name}post_attention_layernorm", hidden, bias=False)
        tensors |= random.linear(f"{name}self_attention.query_key_value", hidden, rows + 2 * groups)
        tensors |= random.linear(f"{name}self_attention.dense", rows, hidden, bias=False)
        tensors |= random.linear(f"{name}mlp.dense_h_to_4h", hidden, 2 * inner, bias=False)
        tensors |= random.linear(f"{name}mlp.dense_4h_to_h", inner, hidden, bias=False)
    tensors |= random.norm("transformer.encoder.final_layernorm", hidden, bias=False)
    head = random.linear("transformer.output_layer", hidden, config["padded_vocab_size"], False)
    size = config["kv_channels"] // 2
    frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
    return tensors | head | {"transformer.rotary_pos_emb.inv_freq": frequencies}


def rotate_pairs(x: Tensor, base: float) -> Tensor:
    """Rotates pairs (2i, 2i + 1) of the first half of each head of x [rows, heads, d]."""
    size = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.arange(len(x)).float()[:, None, None] * frequencies
    even, odd = x[..., :size:2], x[..., 1:size:2]
    turned = torch.stack(
        [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1
    )
    return torch.cat([turned.flatten(-2), x[..., size:]], dim=-1)


class ChatGlm:
    """The model of a folder of the given generation."""

    def __init__(self, folder: Path, generation: int = 2) -> None:
        self.config = read_json(folder / "config.json")
        self.generation = generation
        self.tokenizer = words.read_tokenizer(folder)
        self.tensors = read_tensors(folder)

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        """The prompt's ids; ChatGLM2 takes questions and answers in turn."""
        start = "<sop>" if self.generation == 4 else "sop"
        ids = [token_id(self.tokenizer, token) for token in ("[gMASK]", start)]
        if self.generation == 2:
            return ids + words.encode(self.tokenizer, self.rounds([text for _, text in turns]))
        for role, text in turns:
            parts = ["\n", text] if self.generation == 3 else [f"\n{text}"]
            ids.append(token_id(self.tokenizer, f"<|{role}|>"))
            ids += [token for part in parts for token in words.encode(self.tokenizer, part)]
        return [*ids, token_id(self.tokenizer, "<|assistant|>")]

    @staticmethod
    def rounds(texts: Sequence[str]) -> str:
        """Questions and answers in turn, the last question unanswered."""
        parts = []
        for number, question in enumerate(texts[::2], 1):
            answer = texts[2 * number - 1] + "\n\n" if 2 * number <= len(texts) else ""
            parts.append(f"[Round {number}]\n\n问：{question}\n\n答：{answer}")
        return "".join(parts)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [ids, vocabulary]."""
        eps = self.config["layernorm_epsilon"]
        x = self.tensors["transformer.embedding.word_embeddings.weight"][torch.tensor(ids)]
        for layer in range(self.config["num_layers"]):
            part = below(self.tensors, f"transformer.encoder.layers.{layer}.")
            x = x + self._attention(rms_norm(x, part["input_layernorm.weight"], eps), part)
            y = rms_norm(x, part["post_attention_layernorm.weight"], eps)
            gate, up = linear(y, part, "mlp.dense_h_to_4h").chunk(2, dim=-1)
            x = x + linear(functional.silu(gate) * up, part, "mlp.dense_4h_to_h")
        x = rms_norm(x, self.tensors["transformer.encoder.final_layernorm.weight"], eps)
        return linear(x, self.tensors, "transformer.output_layer")

    def _attention(self, x: Tensor, part: dict[str, Tensor]) -> Tensor:
        config = self.config
        counts = [config["num_attention_heads"], *[config["multi_query_group_num"]] * 2]
        packed = linear(x, part, "self_attention.query_key_value")
        rows = packed.unflatten(-1, (-1, config["kv_channels"]))
        if config["multi_query_attention"]:
            query, key, value = rows.split(counts, dim=1)
        else:
            query, key, value = rows.unflatten(1, (-1, 3)).unbind(2)
        base = 10000.0 * config.get("rope_ratio", 1)
        query, key = rotate_pairs(query, base), rotate_pairs(key, base)
        return linear(attention(query, key, value, causal(len(x))), part, "self_attention.dense")

    def generate(self, ids: Sequence[int], count: int) -> Generated:
        """`count` greedy tokens. No id stops it."""
        return greedy(self.logits, ids, count)
