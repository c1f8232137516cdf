"""ChatGLM-6B: layer norms, residuals that are scaled, and two positions for each token.

Of a prompt the tokens before the one that begins the answer see each other; what follows is causal. Half of each head
is rotated by a token's first position, half by its second:

    first    its index before the answer, from there on that of the mask that the answer stands for
    second   0 before the answer, from there on 1, 2, ...

Scores depend on differences of positions alone, so the first ones are counted from the mask here: what belongs to the
answer has the same in every prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import LanguageWeights
from services.decoder.models.llama import Llama, embedding_and_head
from services.decoder.steps.attention_meta import Heads, Packed, PagedKV
from services.decoder.steps.needs import AttentionKind, Needs
from services.decoder.steps.step import Step
from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig
from tessera.common.v1.media_pb2 import MediaItem

_NAMES = {
    "word_embeddings": "embed_tokens",
    "final_layernorm": "norm",
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
# Ids of the released tokenizer: of a mask, of one to the end of the text, and of the answer's beginning. In that of the
# first release, whose config.json names the last alone, they lie as far from each other.
_MASK, _LONG_MASK, _BEGIN = 130_000, 130_001, 130_004

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class _Block:
    attention_norm: _Norm
    qkv: Packed
    output: Packed
    mlp_norm: _Norm
    up: Packed
    down: Packed


class ChatGLM6B(Llama):
    """Zeng et al., 2023. Embedding and output matrix are those of `Llama`."""

    needs = Needs(attention=AttentionKind.PREFIX_LM)
    takes_adapters: ClassVar[bool] = False  # `forward` has no place for them
    rotary_axes = 2
    REACH: ClassVar[int] = 2  # first positions before and behind the mask
    TENSORS: ClassVar[str] = (
        r"embed_tokens\.weight|lm_head\.weight|norm\.(weight|bias)"
        r"|layers\.\d+\.(input|post_attention)_layernorm\.(weight|bias)"
        r"|layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(up|down)_proj)\.(weight|bias)"
    )

    def __init__(self, config: DecoderConfig, ops: BaseOps, max_model_len: int) -> None:
        super().__init__(config, ops, max_model_len)
        self._blocks: list[_Block] = []
        self._last_norm: _Norm
        self._middle = max_model_len  # the mask's place in the table of rotations
        self._ids = (_MASK, _LONG_MASK, _BEGIN)
        self._residual = math.sqrt(2 * config.num_layers)

    @staticmethod
    def heads(config: DecoderConfig, ops: BaseOps) -> Heads:
        """As the model has them: two rotations divide each in quarters."""
        return ops.share.heads(config)

    @staticmethod
    def canonical(name: str) -> str:
        """See `Llama.canonical`."""
        name = name.removeprefix("transformer.")
        for stored, canonical in _NAMES.items():
            name = name.replace(stored, canonical)
        return name

    @classmethod
    def load(cls, checkpoint: Checkpoint, ops: BaseOps, max_model_len: int) -> "ChatGLM6B":
        """See `Llama.load`."""
        config = registry.decoder_config(checkpoint)
        weights = LanguageWeights(checkpoint, cls.TENSORS, cls.IGNORED, cls.canonical)
        model = cls(config, ops, max_model_len)
        model._read_ids(checkpoint)
        table, head = embedding_and_head(weights, config)
        model._blocks = [_load_block(weights, i, config, ops) for i in range(config.num_layers)]
        model._last_norm = _load_norm(weights, "norm", config, ops)
        model.generates = head is not None
        if head is not None:
            model._head = ops.pack_head(head)
        model._embedding = ops.embedding_table(table)
        weights.finish()
        return model

    def prefix(self, prompt: Ids) -> int:
        """What stands before the token that begins the answer; all where there is none."""
        found = np.flatnonzero(prompt == self._ids[2])
        return int(found[0]) if len(found) else len(prompt)

    def positions(
        self, prompt: Ids, media: Sequence[MediaItem]
    ) -> "tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], int]":
        """First positions, counted from the mask and moved by half of the table of rotations, and second ones.

        From the answer on `rotation` does not look at the first.
        """
        begin, indices = self.prefix(prompt), np.arange(len(prompt))
        short, long, _ = self._ids
        masks = np.flatnonzero(prompt == long)
        masks = masks if len(masks) else np.flatnonzero(prompt == short)
        mask = int(masks[0]) if len(masks) else begin - 1
        first = indices - mask + self._middle
        second = np.maximum(indices - begin + 1, 0)
        return np.stack([first, second]).astype(np.int32), 1 - begin

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `Llama.rotation`; in the order of `_order`."""
        second = positions[1]
        first = torch.where(second > 0, self._middle, positions[0])
        half = self._cos.shape[-1] // 2
        cos, sin = (
            # Of either half of a row the first quarter of the other: the signs of sines stay where they are.
            [
                table[axis, :, start : start + half // 2]
                for start in (0, half)
                for axis in (first, second)
            ]
            for table in (self._cos, self._sin)
        )
        return torch.cat(cos, -1), torch.cat(sin, -1)

    def forward(self, hidden: Tensor, step: Step, caches: Sequence[PagedKV]) -> Tensor:
        """See `DecoderModel.forward`."""
        ops, config, meta = self._ops, self.config, step.meta
        cos, sin = self.rotation(step.positions)
        heads = self.heads(config, ops)
        scale = config.head_size**-0.5
        for block, cache in zip(self._blocks, caches, strict=False):
            normed = self._normed(hidden, block.attention_norm)
            fused = ops.linear(normed, block.qkv)
            q, k, v = ops.qkv_rope_write(fused, cos, sin, heads, cache, meta)
            mixed = ops.paged_attention(q, k, v, cache, meta, scale=scale)
            hidden = normed * self._residual + ops.linear(mixed.flatten(1), block.output)
            normed = self._normed(hidden, block.mlp_norm)
            inner = ops.linear_gelu(normed, block.up)
            hidden = normed * self._residual + ops.linear(inner, block.down)
        return self._normed(hidden, self._last_norm)

    def _normed(self, x: Tensor, norm: _Norm) -> Tensor:
        return self._ops.layer_norm(x, norm.weight, norm.bias, self.config.rms_norm_eps)

    def _read_ids(self, checkpoint: Checkpoint) -> None:
        """Those that config.json names."""
        config = checkpoint.text_config
        begin = int(config.get("bos_token_id", _BEGIN))
        masks = {"mask_token_id": _MASK, "gmask_token_id": _LONG_MASK}
        short, long = (int(config.get(key, begin - _BEGIN + own)) for key, own in masks.items())
        self._ids = (short, long, begin)


def _load_block(weights: LanguageWeights, i: int, config: DecoderConfig, ops: BaseOps) -> _Block:
    layer, hidden, inner = f"layers.{i}", config.hidden_size, config.intermediate_size
    qkv = weights.take_linear(f"{layer}.self_attn.qkv_proj", 3 * hidden, hidden, True)
    return _Block(
        attention_norm=_load_norm(weights, f"{layer}.input_layernorm", config, ops),
        qkv=ops.pack(qkv.reordered(_order(config))),
        output=ops.pack(weights.take_linear(f"{layer}.self_attn.o_proj", hidden, hidden, True)),
        mlp_norm=_load_norm(weights, f"{layer}.post_attention_layernorm", config, ops),
        up=ops.pack_gelu(weights.take_linear(f"{layer}.mlp.up_proj", inner, hidden, True)),
        down=ops.pack(weights.take_linear(f"{layer}.mlp.down_proj", hidden, inner, True)),
    )


def _load_norm(weights: LanguageWeights, name: str, config: DecoderConfig, ops: BaseOps) -> _Norm:
    parts = (weights.take(f"{name}.{part}", config.hidden_size) for part in ("weight", "bias"))
    return _Norm(*(ops.vector(part) for part in parts))


def _order(config: DecoderConfig) -> list[int]:
    """Of each row of a layer's queries, keys and values the row of the stored ones, where each head has its query, its
    key and its value. Ops rotate an element of a head's first half with one of its second; pairs lie in one half here.
    """
    size, quarter = config.head_size, config.head_size // 4
    quarters = [range(start, start + quarter) for start in range(0, size, quarter)]
    turned = [place for part in (0, 2, 1, 3) for place in quarters[part]]
    return [
        head * 3 * size + part * size + place
        for part, places in enumerate((turned, turned, range(size)))
        for head in range(config.num_heads)
        for place in places
    ]
