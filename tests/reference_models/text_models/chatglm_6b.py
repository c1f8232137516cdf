"""ChatGLM-6B, the first generation: two positions a token, a prompt that sees itself, scaled residuals.

Assumption: rounds are numbered from 0.
Assumption: tokenizer.json stands for `ice_text.model`: its ids with num_image_tokens = 0, and the
replacements (`<n>`, `<|tab|>`, `<|blank_n|>`) as added tokens; the longest run of blanks comes first.
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
    layer_norm,
    linear,
    read_json,
    read_tensors,
    rotate_half,
    write_folder,
)

BASE = 10000.0
LONGEST_BLANK = 80
REPLACEMENTS = [("\n", "<n>"), ("\t", "<|tab|>")] + [
    (" " * length, f"<|blank_{length}|>") for length in range(LONGEST_BLANK, 1, -1)
]


def write_checkpoint(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny checkpoint; `changes` of keys of config.json."""
    vocab_size = 520
    config: dict[str, Any] = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "inner_hidden_size": 96,
        "num_layers": 3,
        "num_attention_heads": 4,
        "layernorm_epsilon": 1e-5,
        "max_sequence_length": 512,
        "position_encoding_2d": True,
        "pad_token_id": 3,
        "mask_token_id": vocab_size - 8,
        "gmask_token_id": vocab_size - 7,
        "bos_token_id": vocab_size - 4,
        "eos_token_id": vocab_size - 3,
    } | changes
    special = {
        "[MASK]": config["mask_token_id"],
        "[gMASK]": config["gmask_token_id"],
        "<sop>": config["bos_token_id"],
        "<eop>": config["eos_token_id"],
    }
    plain = {token: vocab_size - 110 + place for place, (_, token) in enumerate(REPLACEMENTS)}
    tokenizer = words.blank_keeping_words(special, plain)
    tensors = _draw(config, Draw(seed))
    return write_folder(folder, config, tensors, tokenizer, eos_token="<eop>")


def _draw(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["inner_hidden_size"]
    tensors = {"transformer.word_embeddings.weight": random.weight(config["vocab_size"], hidden)}
    for layer in range(config["num_layers"]):
        name = f"transformer.layers.{layer}."
        tensors |= random.norm(f"{name}input_layernorm", hidden)
        tensors |= random.norm(f"{name}post_attention_layernorm", hidden)
        tensors |= random.linear(f"{name}attention.query_key_value", hidden, 3 * hidden)
        tensors |= random.linear(f"{name}attention.dense", hidden, hidden)
        tensors |= random.linear(f"{name}mlp.dense_h_to_4h", hidden, inner)
        tensors |= random.linear(f"{name}mlp.dense_4h_to_h", inner, hidden)
    tensors |= random.norm("transformer.final_layernorm", hidden)
    return tensors | random.linear("lm_head", hidden, config["vocab_size"], bias=False)


class ChatGlm6B:
    """The model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        self.tokenizer = words.read_tokenizer(folder)
        self.tensors = read_tensors(folder)

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Text, [gMASK], <sop>."""
        text = self.prompt(turns)
        for plain, token in REPLACEMENTS:
            text = text.replace(plain, token)
        ends = [self.config["gmask_token_id"], self.config["bos_token_id"]]
        return words.encode(self.tokenizer, text) + ends

    @staticmethod
    def prompt(turns: Sequence[Turn]) -> str:
        """A first question as it is; later ones with the rounds before."""
        texts = [text for _, text in turns]
        if len(texts) == 1:
            return texts[0]
        asked, answered = texts[::2], texts[1::2]
        rounds = [
            f"[Round {number}]\n问：{question}\n答：{answer}\n"
            for number, (question, answer) in enumerate(zip(asked, answered, strict=False))
        ]
        return "".join(rounds) + f"[Round {len(rounds)}]\n问：{asked[-1]}\n答："

    def text(self, ids: Sequence[int]) -> str:
        """Decoded ids, with newlines, tabs and blanks as they were."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        for plain, token in REPLACEMENTS:
            text = text.replace(token, plain)
        return text

    def positions(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Position and block position [ids] each."""
        start, mask = (
            list(ids).index(self.config[key]) for key in ("bos_token_id", "gmask_token_id")
        )
        places = torch.arange(len(ids))
        return torch.where(places < start, places, mask), (places - start + 1).clamp(min=0)

    def seen(self, ids: Sequence[int]) -> Tensor:
        """[ids, ids]: all see what is before <sop>, the rest is causal."""
        start = list(ids).index(self.config["bos_token_id"])
        return causal(len(ids)) | (torch.arange(len(ids)) < start)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [ids, vocabulary]."""
        eps, count = self.config["layernorm_epsilon"], self.config["num_layers"]
        scale = (2 * count) ** 0.5
        positions, seen = self.positions(ids), self.seen(ids)
        x = self.tensors["transformer.word_embeddings.weight"][torch.tensor(ids)]
        for layer in range(count):
            part = below(self.tensors, f"transformer.layers.{layer}.")
            y = layer_norm(x, part, "input_layernorm", eps)
            x = y * scale + self._attention(y, part, positions, seen)
            y = layer_norm(x, part, "post_attention_layernorm", eps)
            inner = functional.gelu(linear(y, part, "mlp.dense_h_to_4h"), approximate="tanh")
            x = y * scale + linear(inner, part, "mlp.dense_4h_to_h")
        x = layer_norm(x, self.tensors, "transformer.final_layernorm", eps)
        return linear(x, self.tensors, "lm_head")

    def _attention(
        self, x: Tensor, part: dict[str, Tensor], positions: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        packed = linear(x, part, "attention.query_key_value")
        heads = packed.unflatten(-1, (self.config["num_attention_heads"], -1))
        query, key, value = heads.chunk(3, dim=-1)
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        return linear(attention(query, key, value, seen), part, "attention.dense")

    @staticmethod
    def _rotate(x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        # Half of each head by the position, half by the block position.
        halves = zip(x.chunk(2, dim=-1), positions, strict=True)
        return torch.cat([rotate_half(half, places, BASE) for half, places in halves], dim=-1)

    def generate(self, ids: Sequence[int], count: int) -> Generated:
        """`count` greedy tokens. No id stops it."""
        return greedy(self.logits, ids, count)
