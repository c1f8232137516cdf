"""Molmo's language model: Llama's block under other names; rows of pictures are added to what their tokens have."""

import re
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import LanguageWeights, canonical_name
from services.decoder.models.llama import Llama
from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.weights.linear_weight import LinearWeight

_ADDED = "embed_tokens.added"
_NAMES = {
    "wte.embedding": "embed_tokens.weight",
    "wte.new_embedding": _ADDED,
    "ln_f.": "norm.",
    "att_proj": "self_attn.qkv_proj",
    "attn_out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ff_proj": "mlp.gate_up_proj",
}
_BLOCK = re.compile(r"blocks\.")


class Molmo(Llama):
    """Deitke et al., 2024, with norms before attention and MLP. The tokens of pictures have an embedding of their own
    and no output."""

    TENSORS: ClassVar[str] = rf"{Llama.TENSORS}|{re.escape(_ADDED)}"
    NORMS: ClassVar[tuple[str, str]] = ("input", "post_attention")  # `attn_norm`, `ff_norm`

    @classmethod
    def canonical(cls, name: str) -> str:
        """See `Llama.canonical`."""
        name = canonical_name(name).removeprefix("transformer.")
        for stored, canonical in _NAMES.items():
            name = name.replace(stored, canonical)
        if not name.startswith("blocks."):
            return name.replace("ff_out.", "lm_head.")
        for stored, norm in zip(("attn_norm", "ff_norm"), cls.NORMS, strict=True):
            name = name.replace(stored, f"{norm}_layernorm")
        return _BLOCK.sub("layers.", name, count=1).replace("ff_out", "mlp.down_proj")

    @classmethod
    def load(cls, checkpoint: Checkpoint, ops: BaseOps, max_model_len: int) -> Llama:
        """See `Llama.load`."""
        kind = Molmo if registry.decoder_config(checkpoint).pre_norms else _NormAfter
        return super(Molmo, kind).load(checkpoint, ops, max_model_len)

    def load_tables(self, weights: LanguageWeights) -> tuple[Tensor, LinearWeight]:
        """See `Llama.load_tables`; the embedding of the pictures' tokens is kept beside."""
        width, extra = self.config.hidden_size, weights.shape(_ADDED)[0]
        known = self.config.vocab_size - extra
        self._added = self._ops.embedding_table(weights.take(_ADDED, extra, width))
        table = weights.take("embed_tokens.weight", known, width)
        return table, weights.take_linear("lm_head", known, width)

    def embed(
        self, ids: Tensor, embeds: Sequence[Tensor], runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """See `DecoderModel.embed`; rows are added."""
        ops, known = self._ops, len(self._embedding)
        hidden = ops.embedding(ids.clamp(max=known - 1), self._embedding)
        added = ops.embedding((ids - known).clamp(min=0), self._added)
        hidden = torch.where((ids >= known)[:, None], added, hidden)
        for rows, (first, count) in zip(embeds, runs, strict=True):
            hidden[first : first + count] += rows
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel.logits`: those of the pictures' tokens are -inf."""
        return F.pad(super().logits(hidden), (0, len(self._added)), value=float("-inf"))


class _NormAfter(Molmo):
    """With norms of what attention and MLP give, and none before them."""

    NORMS: ClassVar[tuple[str, str]] = ("post_self_attn", "post_mlp")
