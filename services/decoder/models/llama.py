"""Llama and whatever shares its block: RMS norm, rotary grouped-query attention, SwiGLU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import ClassVar

import structlog
import torch
from torch import Tensor

from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import LanguageWeights, canonical_name
from services.decoder.models.adapters import Adapter, SegmentsOfLayers, addition_bytes
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.layer_spec import LayerSpec, Paged
from services.decoder.models.layer_weights import heads, load_layer
from services.decoder.models.lora import load_lora
from services.decoder.models.rope import rope_table
from services.decoder.steps.attention_meta import Heads, Packed, PagedKV
from services.decoder.steps.step import Step
from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.lora.adapter import LoraAdapter
from shared.model_config.decoder import DecoderConfig
from shared.weights.coded_rows import Table
from shared.weights.linear_weight import LinearWeight

log = structlog.get_logger(__name__)


class Llama(DecoderModel):
    """Touvron et al., 2023; grouped queries, rotary variants, norms of heads and norms behind attention and MLP as in
    its successors. A family whose checkpoints have other names overrides `canonical`."""

    # There are rotations for so many times the longest sequence.
    REACH: ClassVar[int] = 1
    # Canonical names of the tensors; which of them a checkpoint has follows from its configuration.
    TENSORS: ClassVar[str] = (
        r"embed_tokens\.weight|norm\.weight|lm_head\.weight|score\.weight"
        r"|layers\.\d+\.(input|post_attention|post_self_attn|post_mlp)_layernorm\.weight"
        r"|layers\.\d+\.self_attn\.[qk]_norm\.weight"
        r"|layers\.\d+\.(self_attn\.(qkv|[qkvo])_proj|mlp\.(gate_up|gate|up|down)_proj)\.(weight|bias)"
    )
    # Old checkpoints stored what follows from the configuration.
    IGNORED: ClassVar[str] = r".*rotary_emb\.inv_freq"

    takes_adapters: ClassVar[bool] = True

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, ops: BaseOps, max_model_len: int) -> None:
        self.config = config
        own = self.heads(config, ops)
        self.layers: list[LayerSpec] = [
            Paged(own.num_kv, own.size, own.size, ops.dtype, window, coded=ops.codes_cache)
            for window in config.windows
        ]
        self._ops = ops
        cos, sin = rope_table(config.rope, self.REACH * max_model_len, ops.dtype, own.size)
        self._cos, self._sin = ops.rotary_table(cos, sin)
        self._layers: list[DecoderLayer] = []
        self._embedding: Table
        self._first_norm: Tensor | None
        self._head: Packed  # of several ranks this one's share
        self._outputs: int  # of all ranks together
        self._media_adapter: Adapter | None = None
        self._adapters: dict[int, Adapter] = {}  # by their numbers
        self._segments = SegmentsOfLayers(config.num_layers)
        self.adapters: dict[str, int] = {}
        self.sums = 2 * config.num_layers  # behind attention, and behind the MLP

    @staticmethod
    def heads(config: DecoderConfig, ops: BaseOps) -> Heads:
        """Those of each layer that are computed here, as `load_layer` loads them."""
        return heads(config, ops)

    @staticmethod
    def canonical(name: str) -> str:
        """The canonical name of a stored tensor, a spelling of those in `TENSORS`."""
        return canonical_name(name)

    @classmethod
    def check_names(cls, checkpoint: Checkpoint) -> int:
        """See `DecoderModel.check_names`."""
        return len(list(cls._weights(checkpoint)))

    @classmethod
    def _weights(cls, checkpoint: Checkpoint) -> LanguageWeights:
        return LanguageWeights(checkpoint, cls.TENSORS, cls.IGNORED, cls.canonical)

    @classmethod
    def load(cls, checkpoint: Checkpoint, ops: BaseOps, max_model_len: int) -> "Llama":
        """Embedding rows stay in the file."""
        config = registry.decoder_config(checkpoint)
        weights = cls._weights(checkpoint)
        model = cls(config, ops, max_model_len)
        table, head = model.load_tables(weights)
        names = [f"layers.{i}.input_layernorm.weight" for i in range(config.num_layers)]
        norms = [
            ops.vector(weights.take(name, config.hidden_size))
            for name in (*(names if config.pre_norms else ()), "norm.weight")
        ]
        first, *after = norms if config.pre_norms else [None] * config.num_layers + norms
        model._first_norm = first
        model.load_layers(weights, after)
        model.generates = head is not None
        if head is not None:
            model._head = ops.pack_head(ops.share.outputs(head))
            model._outputs = head.out
        if "score.weight" in weights:
            labels = weights.shape("score.weight")[0]
            model.score_head = weights.take("score.weight", labels, config.hidden_size).float()
        model._embedding = ops.embedding_table(table)
        model._media_adapter = model.load_media_adapter(weights, checkpoint)
        weights.finish()
        return model

    def load_layers(self, weights: LanguageWeights, after: Sequence[Tensor | None]) -> None:
        """Takes all layers; after: the norm behind each."""
        self._layers = [self.load_layer(weights, i, norm) for i, norm in enumerate(after)]

    def load_layer(
        self, weights: LanguageWeights, number: int, after_norm: Tensor | None
    ) -> DecoderLayer:
        """Takes one layer, whose weights tell what its cache keeps beside codes."""
        layer = load_layer(weights, number, after_norm, self.config, self._ops)
        spec = self.layers[number]
        if isinstance(spec, Paged) and spec.coded:
            self.layers[number] = replace(spec, kept=layer.kept)
        return layer

    def load_tables(self, weights: LanguageWeights) -> tuple[Table, LinearWeight | None]:
        """The token embedding [ids, hidden] and the output matrix [ids, hidden]; None where it is for vectors."""
        return embedding_and_head(weights, self.config)

    def load_media_adapter(
        self, weights: LanguageWeights, checkpoint: Checkpoint
    ) -> Adapter | None:
        """Partial LoRA, for models that have it."""
        return None

    def read_adapter(
        self, checkpoint: Checkpoint, called: str, adapter: LoraAdapter
    ) -> Callable[[], None]:
        """See `DecoderModel.read_adapter`."""
        self.require_adapters(checkpoint.kind)
        read = load_lora(called, adapter, checkpoint, self.canonical, self.config, self._ops)
        return partial(self._add_adapter, adapter.lora_id, read)

    def _add_adapter(self, lora_id: str, adapter: Adapter) -> None:
        number = self.adapters.get(lora_id)
        if number is None:
            number = min(set(range(1, len(self._adapters) + 2)) - self._adapters.keys())
        self._adapters[number] = adapter
        self.adapters[lora_id] = number

    def drop_adapter(self, lora_id: str) -> None:
        """See `DecoderModel.drop_adapter`."""
        del self._adapters[self.adapters.pop(lora_id)]
        self._segments.forget()

    def adapter_bytes(self, rank: int) -> int:
        """See `DecoderModel.adapter_bytes`; of several ranks this one's share."""
        return self.config.num_layers * addition_bytes(rank, self.config, self._ops)

    def embed(
        self, ids: Tensor, embeds: Sequence[Tensor], runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """See `DecoderModel.embed`."""
        hidden = self._ops.embedding(ids, self._embedding)
        for rows, (first, count) in zip(embeds, runs, strict=True):
            hidden[first : first + count] = rows
        return hidden

    def forward(self, hidden: Tensor, step: Step, caches: Sequence[PagedKV]) -> Tensor:
        """See `DecoderModel.forward`."""
        ops = self._ops
        cos, sin = self.rotation(step.positions)
        residual = hidden
        normed = hidden
        if self._first_norm is not None:
            normed = ops.rms_norm(hidden, self._first_norm, self.config.rms_norm_eps)
        adapted = self.adapted_rows(step)
        added = self._segments.of(adapted) if adapted else repeat(None)
        for layer, cache, segments in zip(self._layers, caches, added, strict=False):
            normed, residual = ops.decoder_layer(
                normed, residual, layer, cos, sin, cache, step.meta, segments
            )
        return normed

    def adapted_rows(self, step: Step) -> Sequence[tuple[Adapter, Tensor]]:
        """Which adapters are added for which tokens [n] of a step, in the order in which a token gets them: partial
        LoRA for the tokens that take an embedding row, then the adapters of requests."""
        adapted = [(self._adapters[number], rows) for number, rows in step.adapters]
        if step.media is None or self._media_adapter is None:
            return adapted
        return [(self._media_adapter, step.media), *adapted]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D] at positions [axes, T], as `ops.rope` takes them."""
        places = positions[0]
        return self._cos.index_select(0, places), self._sin.index_select(0, places)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel.logits`."""
        ranks, own = self._ops.ranks, self._ops.linear_float32(hidden, self._head)
        return own if ranks is None else ranks.join(own, self._outputs)

    @property
    def sketched_rows(self) -> int:
        """See `DecoderModel.sketched_rows`."""
        return self._ops.sketched_rows(self._head) if self.generates else 0

    def largest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderModel.largest`."""
        ranks, own = self._ops.ranks, self._ops.largest(hidden, self._head)
        return own if ranks is None else ranks.largest(*own, self._outputs)


def embedding_and_head(
    weights: LanguageWeights, config: DecoderConfig
) -> tuple[Table, LinearWeight | None]:
    """Token embedding and output matrix, each [vocabulary, hidden]: one tensor where they are tied; no matrix where a
    checkpoint that is for vectors has none.

    What is stored goes before what the flag says; a flag without one of the two takes the other.
    """
    names = ("embed_tokens", "lm_head")
    sizes = (config.vocab_size, config.hidden_size)
    stored = [name for name in names if weights.has_linear(name)]
    if config.tied and len(stored) == 1:
        names = (stored[0], stored[0])
    table = weights.take_table(f"{names[0]}.weight", *sizes)
    if names[1] == "lm_head" and "lm_head" not in stored and weights.pools_only:
        return table, None
    head = weights.take_linear(names[1], *sizes)
    both = config.tied and len(stored) == 2
    if both and isinstance(table, Tensor) and not torch.equal(table, head.dense(table.dtype)):
        log.warning(
            "tie_word_embeddings is set, but lm_head.weight is stored and differs from the embedding:"
            " the stored head is used; set tie_word_embeddings to false"
        )
    return table, head
