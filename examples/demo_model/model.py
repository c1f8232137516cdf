"""The network: a standard `LlavaForConditionalGeneration`, and faster forward passes through it for training.

The forward passes here run the same modules that `transformers` runs, without its bookkeeping.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

IMAGE_SIZE = 144  # pixels, both sides
PATCH = 16
GRID = IMAGE_SIZE // PATCH  # 9: three patches to a third of the picture
PATCHES = GRID * GRID
EARLY = 2  # layers after which a patch must know its own pixels

# Special tokens hold the first ids; `tokenizer.py` keeps the same order.
SPECIAL_TOKENS = ("<pad>", "<s>", "<|end|>", "<image>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, END, IMAGE, SYSTEM, USER, ASSISTANT = range(len(SPECIAL_TOKENS))


def build_config(vocab_size: int) -> LlavaConfig:
    """The shape of the network: about seven million parameters."""
    vision = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=7,
        num_attention_heads=6,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
        attention_bias=False,
        mlp_bias=False,
    )
    make: Any = LlavaConfig  # its typed signature knows only some of its fields
    config: LlavaConfig = make(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
    )
    return config


def build_model(vocab_size: int, seed: int = 0) -> LlavaForConditionalGeneration:
    """A fresh network in float32."""
    torch.manual_seed(seed)
    model: LlavaForConditionalGeneration = LlavaForConditionalGeneration(build_config(vocab_size))
    with torch.no_grad():  # the default of 1.0-scale rows would drown the first steps
        model.model.vision_tower.embeddings.position_embedding.weight.normal_(std=0.02)
    return model


def normalise(pixels: Tensor) -> Tensor:
    """(batch, 144, 144, 3) uint8 to (batch, 3, 144, 144) float in -1..1, as the processor does."""
    return pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def see(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Features of each patch, from the last and from an early layer of the tower.

    pixels: (batch, 3, 144, 144); returns the features after the last layer and after layer
    `EARLY`, both (batch, 81, 192).
    """
    tower = model.model.vision_tower
    hidden = early = tower.embeddings(pixels)
    for number, layer in enumerate(tower.encoder.layers):
        if number == EARLY:
            early = hidden
        attention, x = layer.self_attn, layer.layer_norm1(hidden)
        heads = (*x.shape[:2], attention.num_heads, -1)
        q = attention.q_proj(x).view(heads).transpose(1, 2)
        k = attention.k_proj(x).view(heads).transpose(1, 2)
        v = attention.v_proj(x).view(heads).transpose(1, 2)
        # Spelt out: for rows this short the CPU's fused kernel is five times slower in bfloat16.
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + attention.out_proj(mixed)
        hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
    return hidden, early


def read(
    model: Any,
    prefix: Tensor,
    features: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    mask: Tensor,
) -> Tensor:
    """Hidden states of the decoder over `rows`: (batch, rows, length, 256).

    The prefix of each picture is computed once for many questions: all rows attend to their picture's
    prefix, and within a row as `mask` allows, so that no question sees another one's answer.

    prefix: (batch, p) ids, the last 81 of them `IMAGE` where features (batch, 81, 192) are given;
    rows, positions: (batch, rows, length); mask: (batch, rows, length, length) additive.
    """
    language = model.model.language_model
    head = language.embed_tokens(prefix)
    if features is not None:
        seen = model.model.multi_modal_projector(features).to(head.dtype)
        head = torch.cat([head[:, : prefix.shape[1] - PATCHES], seen], dim=1)
    body = language.embed_tokens(rows)
    size, p = prefix.shape
    order = torch.arange(p, device=prefix.device)
    causal = torch.full((p, p), float("-inf"), device=prefix.device, dtype=head.dtype).triu(1)
    head_turn = _turn(language, order[None].expand(size, p), head)
    body_turn = _turn(language, positions.flatten(0, 1), body)
    many, length = rows.shape[1:]
    allowed = F.pad(mask, (p, 0)).view(size * many, 1, length, p + length)
    for layer in language.layers:
        x, y = layer.input_layernorm(head), layer.input_layernorm(body)
        q1, k1, v1 = _heads(layer.self_attn, x, head_turn)
        q2, k2, v2 = _heads(layer.self_attn, y.flatten(0, 1), body_turn)
        scale = q1.shape[-1] ** -0.5
        own = (q1 * scale @ k1.transpose(-1, -2) + causal).softmax(-1) @ v1
        head = head + layer.self_attn.o_proj(own.transpose(1, 2).flatten(2))
        head = head + layer.mlp(layer.post_attention_layernorm(head))
        # Each row has its picture's keys in front of its own.
        k, v = (
            torch.cat([one.repeat_interleave(many, 0), two], dim=-2)
            for one, two in ((k1, k2), (v1, v2))
        )
        mixed = (q2 * scale @ k.transpose(-1, -2) + allowed).softmax(-1) @ v
        mixed = mixed.transpose(1, 2).flatten(2).view_as(body)
        body = body + layer.self_attn.o_proj(mixed)
        body = body + layer.mlp(layer.post_attention_layernorm(body))
    return language.norm(body)  # type: ignore[no-any-return]


def _turn(language: Any, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary positions: (batch, 1, length, head_dim) each."""
    cos, sin = language.rotary_emb(like, position_ids=positions)
    return cos[:, None].to(like.dtype), sin[:, None].to(like.dtype)


def _heads(attention: Any, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Queries, keys and values, each (batch, heads, length, head_dim), grouped keys repeated."""
    shape = (*x.shape[:-1], -1, attention.head_dim)
    q, k, v = (
        f(x).view(shape).transpose(1, 2)
        for f in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = turn
    q, k = q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin
    groups = attention.num_key_value_groups
    return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
