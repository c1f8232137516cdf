"""The network: a standard `LlavaForConditionalGeneration`, and lean ways through it for training.

The forward passes here run the same modules that `transformers` runs, without its bookkeeping.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from shared.demo_model.palette import COLOURS
from shared.demo_model.scenes import SHAPES, Scene

IMAGE_SIZE = 144  # pixels, both sides
PATCH = 16
GRID = IMAGE_SIZE // PATCH  # 9: three patches to a third of the picture
PATCHES = GRID * GRID
EARLY = 2  # layers after which a patch must know its own pixels

# Special tokens hold the first ids; `tokenizer.py` keeps the same order.
SPECIAL_TOKENS = ("<pad>", "<s>", "<|end|>", "<image>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, END, IMAGE, SYSTEM, USER, ASSISTANT = range(len(SPECIAL_TOKENS))

KINDS = ("nothing", *SHAPES, "number")  # classes of the dense heads
INK = 64  # a patch's own mask, 8 x 8
DIGITS = 11  # 0..9 and "no such digit"


def build_config(vocab_size: int) -> LlavaConfig:
    """The shape of the network: about seven million parameters."""
    vision = SiglipVisionConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=7, num_attention_heads=6,
        image_size=IMAGE_SIZE, patch_size=PATCH, vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=576, num_hidden_layers=5,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=4096,
        rms_norm_eps=1e-5, tie_word_embeddings=True, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=END, attention_bias=False, mlp_bias=False,
    )
    return LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=PATCHES,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
        projector_hidden_act="gelu", tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=END,
    )


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


def see(model: LlavaForConditionalGeneration, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """What the tower says of each patch, and what it thinks early on.

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
    model: LlavaForConditionalGeneration, prefix: Tensor, features: Tensor | None, rows: Tensor,
    positions: Tensor, mask: Tensor,
) -> Tensor:
    """Hidden states of the decoder over `rows`: (batch, rows, length, 256).

    Each picture is read once and asked many things: all rows look at their picture's prefix, and
    inside a row only where `mask` lets them, so that no question sees another one's answer.

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
    for layer in language.layers:
        x, y = layer.input_layernorm(head), layer.input_layernorm(body)
        q1, k1, v1 = _heads(layer.self_attn, x, head_turn)
        q2, k2, v2 = _heads(layer.self_attn, y.flatten(0, 1), body_turn)
        scale = q1.shape[-1] ** -0.5
        own = (q1 @ k1.transpose(-1, -2) * scale + causal).softmax(-1) @ v1
        head = head + layer.self_attn.o_proj(own.transpose(1, 2).flatten(2))
        head = head + layer.mlp(layer.post_attention_layernorm(head))
        # (batch, heads, rows * length, p) next to (batch * rows, heads, length, length)
        many, length = rows.shape[1:]
        q2_wide = q2.unflatten(0, (size, many)).transpose(1, 2).flatten(2, 3)
        to_head = (q2_wide @ k1.transpose(-1, -2)).unflatten(2, (many, length)).transpose(1, 2)
        to_body = (q2 @ k2.transpose(-1, -2)).unflatten(0, (size, many))
        scores = torch.cat([to_head * scale, to_body * scale + mask[:, :, None]], dim=-1)
        share_head, share_body = scores.softmax(-1).split((p, length), dim=-1)
        from_head = share_head.transpose(1, 2).flatten(2, 3) @ v1
        from_head = from_head.unflatten(2, (many, length)).transpose(1, 2)
        from_body = (share_body.flatten(0, 1) @ v2).unflatten(0, (size, many))
        mixed = (from_head + from_body).transpose(2, 3).flatten(3)
        body = body + layer.self_attn.o_proj(mixed)
        body = body + layer.mlp(layer.post_attention_layernorm(body))
    return language.norm(body)  # type: ignore[no-any-return]


def _turn(language: nn.Module, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary positions: (batch, 1, length, head_dim) each."""
    cos, sin = language.rotary_emb(like, position_ids=positions)
    return cos[:, None].to(like.dtype), sin[:, None].to(like.dtype)


def _heads(attention: nn.Module, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
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


# --- dense supervision of the tower ---------------------------------------------------------------


class Heads(nn.Module):
    """What each patch must know: for training only, not part of the shipped model."""

    WIDTHS = (len(KINDS), len(COLOURS), 1, 1, 2, 3 * DIGITS)

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, sum(self.WIDTHS))
        self.glyph = nn.Linear(width, 10)
        self.early_norm = nn.LayerNorm(width)
        self.ink = nn.Linear(width, INK)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        return self.out(self.norm(features)).float().split(self.WIDTHS, dim=-1)  # type: ignore


def dense_targets(scene: Scene) -> list[list[float]]:
    """What each patch shows, (81, 10).

    Kind, colour, whether a thing's centre lies here, its log size, the way to its centre (x, y),
    its three digits, and the one digit that lies here.
    """
    rows: list[list[float]] = []
    centres = {}
    for thing in scene.things:
        column, row = int(thing.x * GRID), int(thing.y * GRID)
        centres[row * GRID + column] = thing
    for patch in range(PATCHES):
        x, y = (patch % GRID + 0.5) / GRID, (patch // GRID + 0.5) / GRID
        owner = centres.get(patch)
        if owner is None:
            for thing in scene.things:
                inside_x = abs(x - thing.x) < thing.w * 0.42
                if inside_x and abs(y - thing.y) < thing.h * 0.42:
                    owner = thing
        if owner is None:
            rows.append([0, -1, 0, 0, 0, 0, -1, -1, -1, -1])
            continue
        digits, here = [-1, -1, -1], -1
        if owner.is_number:
            place = (x - owner.x) / owner.w + 0.5
            many = len(owner.value)
            here = int(owner.value[min(many - 1, max(0, int(place * many)))])
            padded = owner.value.rjust(3)
            digits = [10 if d == " " else int(d) for d in padded]
        rows.append([
            KINDS.index(owner.shape), COLOURS.index(owner.colour),
            float(centres.get(patch) is owner),
            math.log(owner.size), owner.x - x, owner.y - y, *digits, here,
        ])
    return rows


def dense_loss(
    heads: Heads, features: Tensor, early: Tensor, targets: Tensor, ink: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the heads and how many of each they get right.

    features, early: (batch, 81, 192); targets: (batch, 81, 10) float as `dense_targets` gives them;
    ink: (batch, 81, 64).
    """
    kind, colour, centre, size, offset, digits = heads(features)
    want_kind, want_colour = targets[..., 0].long(), targets[..., 1].long()
    is_thing, is_centre = want_kind > 0, targets[..., 2] > 0
    weight = 1.0 + 4.0 * is_centre
    kind_loss = F.cross_entropy(kind.flatten(0, 1), want_kind.flatten(), reduction="none")
    loss = (kind_loss * weight.flatten()).mean()
    loss = loss + F.cross_entropy(
        colour.flatten(0, 1), want_colour.flatten(), ignore_index=-1) * 0.5
    loss = loss + F.binary_cross_entropy_with_logits(
        centre[..., 0], targets[..., 2], pos_weight=centre.new_tensor(4.0))
    near = (size[..., 0] - targets[..., 3]).abs() + 3 * (offset - targets[..., 4:6]).abs().sum(-1)
    loss = loss + 0.3 * (near * is_thing).sum() / is_thing.sum().clamp(min=1)
    digits = digits.unflatten(-1, (3, DIGITS))
    want_digits, here = targets[..., 6:9].long(), targets[..., 9].long()
    digit_loss = F.cross_entropy(
        digits.flatten(0, 2), want_digits.flatten(), ignore_index=-1, reduction="none")
    of_number = (want_digits >= 0)
    digit_weight = of_number * (1.0 + 4.0 * is_centre[..., None])
    digit_sum = (digit_loss * digit_weight.flatten()).sum() / digit_weight.sum().clamp(min=1)
    glyph = heads.glyph(heads.norm(features)).float()
    glyph_loss = F.cross_entropy(
        glyph.flatten(0, 1), here.flatten(), ignore_index=-1, reduction="sum")
    loss = loss + glyph_loss / (here >= 0).sum().clamp(min=1)
    mask = heads.ink(heads.early_norm(early)).float()
    loss = loss + digit_sum + 2.0 * F.binary_cross_entropy_with_logits(mask, ink)
    with torch.no_grad():
        n = is_centre.sum().clamp(min=1)
        number = is_centre & (want_digits[..., 0] >= 0)
        right = {
            "kind": ((kind.argmax(-1) == want_kind) & is_centre).sum() / n,
            "colour": ((colour.argmax(-1) == want_colour) & is_centre).sum() / n,
            "centre": ((centre[..., 0] > 0) & is_centre).sum() / n,
            "ink": ((mask > 0) == (ink > 0.5)).float().mean(),
            "glyph": ((glyph.argmax(-1) == here) & (here >= 0)).sum() / (here >= 0).sum().clamp(min=1),
            "number": ((digits.argmax(-1) == want_digits).all(-1) & number).sum()
            / number.sum().clamp(min=1),
        }
    return loss, {k: float(v) for k, v in right.items()}


def parameters_by_part(model: LlavaForConditionalGeneration) -> dict[str, int]:
    """How many parameters each part has."""
    parts: dict[str, Any] = {
        "tower": model.model.vision_tower, "projector": model.model.multi_modal_projector,
        "decoder": model.model.language_model,
    }
    return {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
