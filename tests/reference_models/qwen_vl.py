"""Qwen-VL (v1): a ViT, a resampler of 256 queries, Qwen's first language model.

Assumption: an image's text is `Picture {i}: <img>...</img>` and a newline; the 256 rows replace what
is between the tags, here <imgpad>.
Assumption: role, the newline after it and the message are encoded one by one, an image's text too.
Assumption: <imgpad> is image_start_id + 2 and </img> image_start_id + 1 of config.visual.
Assumption: the image is resized to a square by PIL's bicubic and normalised with CLIP's numbers.
Assumption: the resampler's attention has the names of torch.nn.MultiheadAttention, c_attn's rows are
all q, all k, all v; the last norm and projection follow the resampler.
Assumption: dynamic NTK and log n scaling act above seq_length only, which is refused here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image, Resampling
from torch import Tensor
from torch.nn import functional

from tests.reference_models import tiktoken_words, towers
from tests.reference_models.common import (
    IMAGE,
    Draw,
    Reference,
    Turn,
    attention,
    below,
    causal,
    fill_rows,
    layer_norm,
    linear,
    read_json,
    read_tensors,
    rms_norm,
    rotate_half,
    write_folder,
    write_json,
)

QUERIES = 256
HEAD = 128  # width of a head of the resampler
EPS = 1e-6  # of all norms of the vision model
VISUAL = "transformer.visual."
SYSTEM = "You are a helpful assistant."


def write_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    text: dict[str, Any] | None = None,
    visual: dict[str, Any] | None = None,
) -> Path:
    """A tiny checkpoint with qwen.tiktoken; `text` and `visual` change keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = tiktoken_words.write_ranks(folder)
    config = {
        "model_type": "qwen",
        "architectures": ["QWenLMHeadModel"],
        "vocab_size": ranks + tiktoken_words.SPECIAL_COUNT,
        "hidden_size": 256,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_channels": 64,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "seq_length": 2048,
        "max_position_embeddings": 8192,
        "no_bias": True,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
    } | (text or {})
    config["visual"] = {
        "heads": 4,
        "image_size": 56,
        "image_start_id": ranks + tiktoken_words.IMAGE_START,
        "layers": 2,
        "mlp_ratio": 1.5,
        "output_dim": config["hidden_size"],
        "patch_size": 14,
        "width": 64,
    } | (visual or {})
    random = Draw(seed)
    write_folder(folder, config, _draw_text(config, random) | _draw_vision(config, random), None)
    ends = {"eos_token_id": ranks, "pad_token_id": ranks, "chat_format": "chatml"}
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "QWenTokenizer"})
    return folder


def _draw_text(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"] // 2
    tensors = {"transformer.wte.weight": random.weight(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"transformer.h.{layer}."
        tensors |= random.linear(f"{name}attn.c_attn", hidden, 3 * hidden)
        tensors |= random.linear(f"{name}attn.c_proj", hidden, hidden, bias=False)
        tensors |= random.linear(f"{name}mlp.w1", hidden, inner, bias=False)
        tensors |= random.linear(f"{name}mlp.w2", hidden, inner, bias=False)
        tensors |= random.linear(f"{name}mlp.c_proj", inner, hidden, bias=False)
        tensors |= random.norm(f"{name}ln_1", hidden, bias=False)
        tensors |= random.norm(f"{name}ln_2", hidden, bias=False)
    tensors |= random.norm("transformer.ln_f", hidden, bias=False)
    return tensors | random.linear("lm_head", hidden, config["vocab_size"], bias=False)


def _draw_vision(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    visual = config["visual"]
    width, wide, patch = visual["width"], visual["output_dim"], visual["patch_size"]
    inner = int(width * visual["mlp_ratio"])
    tensors = {
        "conv1.weight": random.weight(width, 3, patch, patch),
        "positional_embedding": random.weight(256, width),
        "proj": random.weight(wide, wide),
        "attn_pool.query": random.weight(QUERIES, wide),
        "attn_pool.pos_embed": random.weight(QUERIES, wide),
        "attn_pool.attn.in_proj_weight": random.weight(3 * wide, wide),
        "attn_pool.attn.in_proj_bias": random.bias(3 * wide),
    }
    tensors |= random.linear("attn_pool.kv_proj", width, wide, bias=False)
    tensors |= random.linear("attn_pool.attn.out_proj", wide, wide)
    for layer in range(visual["layers"]):
        name = f"transformer.resblocks.{layer}."
        tensors |= random.linear(f"{name}attn.in_proj", width, 3 * width)
        tensors |= random.linear(f"{name}attn.out_proj", width, width)
        tensors |= random.linear(f"{name}mlp.c_fc", width, inner)
        tensors |= random.linear(f"{name}mlp.c_proj", inner, width)
        tensors |= random.norm(f"{name}ln_1", width) | random.norm(f"{name}ln_2", width)
    for norm, size in {"ln_pre": width, "ln_post": wide}.items():
        tensors |= random.norm(norm, size)
    for norm in ("ln_q", "ln_kv"):
        tensors |= random.norm(f"attn_pool.{norm}", wide)
    return {VISUAL + name: tensor for name, tensor in tensors.items()}


def to_grid(table: Tensor, rows: int) -> Tensor:
    """A square position table [n, width] as one of `rows` positions, by bicubic interpolation."""
    if len(table) == rows:
        return table
    side, target = int(len(table) ** 0.5), int(rows**0.5)
    square = table.view(1, side, side, -1).permute(0, 3, 1, 2)
    scaled = functional.interpolate(
        square, size=(target, target), mode="bicubic", align_corners=False
    )
    return scaled[0].flatten(1).T


class QwenVL(Reference):
    """The model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        self.words = tiktoken_words.TiktokenWords(folder)
        self.tensors = read_tensors(folder)
        self.visual = below(self.tensors, VISUAL)
        start = self.config["visual"]["image_start_id"]
        self.image_ids = [start, *[start + 2] * QUERIES, start + 1]

    def prompt_ids(self, turns: Sequence[Turn], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Chat ML with 256 placeholders between <img> and </img>."""
        if turns[0][0] != "system":
            turns = [("system", SYSTEM), *turns]
        start, end = (self.words.special(p) for p in (tiktoken_words.START, tiktoken_words.END))
        newline = self.words.encode("\n")
        ids: list[int] = []
        for role, text in turns:
            ids += [*(newline if ids else []), start, *self.words.encode(role), *newline]
            ids += [*self._message(text), end]
        assert ids.count(self.image_ids[0]) == len(sizes)
        return [*ids, *newline, start, *self.words.encode("assistant"), *newline]

    def _message(self, text: str) -> list[int]:
        first, *chunks = text.split(IMAGE)
        rendered = first
        ids: list[int] = []
        for number, chunk in enumerate(chunks, 1):
            ids += self.words.encode(f"{rendered}Picture {number}: ") + self.image_ids
            rendered = f"\n{chunk}"
        return ids + self.words.encode(rendered)

    def pixel_values(self, image: Image) -> Tensor:
        """[3, side, side]."""
        side = self.config["visual"]["image_size"]
        square = image.convert("RGB").resize((side, side), Resampling.BICUBIC)
        return towers.to_pixels(square, towers.CLIP_MEAN, towers.CLIP_STD)

    def embed_image(self, image: Image) -> Tensor:
        """[256, hidden]."""
        x = self.resample(self.tower(self.pixel_values(image)))
        return layer_norm(x, self.visual, "ln_post", EPS) @ self.visual["proj"]

    def tower(self, pixels: Tensor) -> Tensor:
        """[patches, width]."""
        x = towers.embed_patches(pixels, self.visual, "conv1")
        x = x + to_grid(self.visual["positional_embedding"], len(x))
        x = layer_norm(x, self.visual, "ln_pre", EPS)
        heads = self.config["visual"]["heads"]
        for layer in range(self.config["visual"]["layers"]):
            part = below(self.visual, f"transformer.resblocks.{layer}.")
            packed = linear(layer_norm(x, part, "ln_1", EPS), part, "attn.in_proj")
            query, key, value = packed.unflatten(-1, (heads, 3, -1)).unbind(2)
            x = x + linear(attention(query, key, value), part, "attn.out_proj")
            y = linear(layer_norm(x, part, "ln_2", EPS), part, "mlp.c_fc")
            x = x + linear(functional.gelu(y), part, "mlp.c_proj")
        return x

    def resample(self, x: Tensor) -> Tensor:
        """Patches [n, width] as 256 rows [256, output_dim]."""
        part = below(self.visual, "attn_pool.")
        value = layer_norm(linear(x, part, "kv_proj"), part, "ln_kv", EPS)
        key = value + to_grid(part["pos_embed"], len(x))
        normed = functional.layer_norm(
            part["query"], part["query"].shape[1:], part["ln_q.weight"], part["ln_q.bias"], EPS
        )
        query = normed + part["pos_embed"]
        weights, biases = part["attn.in_proj_weight"].chunk(3), part["attn.in_proj_bias"].chunk(3)
        heads = len(weights[0]) // HEAD
        projected = [
            functional.linear(rows, weight, bias).unflatten(-1, (heads, -1))
            for rows, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
        return linear(attention(*projected), part, "attn.out_proj")

    def logits(self, ids: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Logits [ids, vocabulary]."""
        is_image = torch.tensor(ids) == self.image_ids[1]
        table = self.tensors["transformer.wte.weight"]
        return self.text(fill_rows(ids, is_image, table, rows))

    def text(self, x: Tensor) -> Tensor:
        """Logits [rows, vocabulary] for embeddings [rows, hidden]."""
        config, positions, seen = self.config, torch.arange(len(x)), causal(len(x))
        assert len(x) <= config["seq_length"], "longer than seq_length"
        eps, base = config["layer_norm_epsilon"], float(config["rotary_emb_base"])
        for layer in range(config["num_hidden_layers"]):
            part = below(self.tensors, f"transformer.h.{layer}.")
            packed = linear(rms_norm(x, part["ln_1.weight"], eps), part, "attn.c_attn")
            query, key, value = (
                rows.unflatten(-1, (-1, config["kv_channels"])) for rows in packed.chunk(3, dim=-1)
            )
            query, key = rotate_half(query, positions, base), rotate_half(key, positions, base)
            x = x + linear(attention(query, key, value, seen), part, "attn.c_proj")
            y = rms_norm(x, part["ln_2.weight"], eps)
            up, gate = linear(y, part, "mlp.w1"), linear(y, part, "mlp.w2")
            x = x + linear(up * functional.silu(gate), part, "mlp.c_proj")
        return linear(
            rms_norm(x, self.tensors["transformer.ln_f.weight"], eps), self.tensors, "lm_head"
        )
