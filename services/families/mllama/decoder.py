"""Llama 3.2 Vision's decoder: Llama's layers, and between them layers that attend to pictures instead of the text."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import LanguageWeights
from services.decoder.models.layer_spec import EncoderKeys
from services.decoder.models.llama import Llama
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.steps.encoder_keys import MediaView, Stretch
from services.decoder.steps.needs import Needs
from services.decoder.steps.step import Step
from services.families.mllama.attending_layer import AttendingLayer
from services.families.mllama.config import MllamaConfig
from shared.artifacts.small_tensor import array_of
from shared.errors import InvalidRequest
from shared.weights.linear_weight import LinearWeight
from tessera.common.v1.media_pb2 import MediaItem

_MASK = "aspect_ratio_mask"  # of a picture's tiles: 1 for those that it fills
# Marks of tokens: those before the first picture attend to all of them, tiles that are not filled included, and go
# without the layer's MLP.
_BEFORE, _BEHIND = 0, 1


class Mllama(Llama):
    """Dubey et al., 2024, section 7. A text without pictures passes over the layers that attend to them."""

    TENSORS: ClassVar[str] = (
        rf"{Llama.TENSORS}|layers\.\d+\.cross_attn\.([qkvo]_proj|[qk]_norm)\.weight"
        r"|layers\.\d+\.cross_attn_(attn|mlp)_gate"
    )
    needs = Needs(state=True)

    config: MllamaConfig

    def __init__(self, config: MllamaConfig, ops: BaseOps, max_model_len: int) -> None:
        super().__init__(config, ops, max_model_len)
        keys = EncoderKeys(
            config.num_kv_heads, config.head_size, config.head_size, ops.dtype, config.item_rows
        )
        self.layers = [
            keys if number in config.attending else paged
            for number, paged in enumerate(self.layers)
        ]
        self.media_ids = config.num_ids
        self._all: list[DecoderLayer | AttendingLayer]

    def load_layers(self, weights: LanguageWeights, after: Sequence[Tensor | None]) -> None:
        """See `Llama.load_layers`."""
        config, ops = self.config, self._ops
        self._all = [
            AttendingLayer.load(weights, number, norm, config, ops)
            if number in config.attending
            else self.load_layer(weights, number, norm)
            for number, norm in enumerate(after)
        ]

    def load_tables(self, weights: LanguageWeights) -> tuple[Tensor, LinearWeight]:
        """See `Llama.load_tables`: pictures' tokens have an embedding and no output."""
        config = self.config
        table = weights.take("embed_tokens.weight", config.num_ids, config.hidden_size)
        return table, weights.take_linear("lm_head", config.vocab_size, config.hidden_size)

    def media_view(self, prompt_len: int, media: Sequence[MediaItem]) -> MediaView:
        """See `DecoderModel.media_view`. A token sees the picture before it, and those whose tokens stand directly
        before that one's; one before all pictures sees every row."""
        filled = [self._filled_rows(item) for item in media]
        starts = [sum(filled[:number]) for number in range(len(media))]
        total = len(media) * self.config.item_rows
        stretches = [Stretch(0, 0, total, _BEFORE)] if media[0].offset else []
        first = 0
        for number, item in enumerate(media):
            if number and item.offset != media[number - 1].offset + 1:
                first = number
            last = starts[number] + filled[number]
            stretches.append(Stretch(item.offset, starts[first], last, _BEHIND))
        return MediaView(list(self._runs(filled)), stretches)

    def forward(self, hidden: Tensor, step: Step, caches: Sequence[PagedKV]) -> Tensor:
        """See `DecoderModel.forward`."""
        ops = self._ops
        cos, sin = self.rotation(step.positions)
        attending = step.attending
        pages, keys = iter(caches), iter(attending.caches if attending is not None else ())
        residual = hidden
        assert self._first_norm is not None
        normed = ops.rms_norm(hidden, self._first_norm, self.config.rms_norm_eps)
        for layer in self._all:
            if isinstance(layer, DecoderLayer):
                normed, residual = ops.decoder_layer(
                    normed, residual, layer, cos, sin, next(pages), step.meta
                )
                continue
            if attending is not None:
                residual = layer.attend(normed, residual, next(keys), attending)
            normed = ops.rms_norm(residual, layer.after_norm, self.config.rms_norm_eps)
        return normed

    def _filled_rows(self, item: MediaItem) -> int:
        """Rows of the tiles that a picture fills, its first ones."""
        config = self.config
        if item.rows != config.item_rows or item.length != 1 or _MASK not in item.fields:
            raise InvalidRequest(
                "INVALID_MEDIA",
                f"a picture is 1 token and {config.item_rows} rows with {_MASK}, and not {item.length} tokens and"
                f" {item.rows} rows with {', '.join(sorted(item.fields)) or 'nothing'}",
                field="media",
            )
        tiles = int(array_of(item.fields[_MASK]).sum())
        return min(max(tiles, 1) * config.tile_rows, item.rows)

    def _runs(self, filled: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Rows of tiles that are filled first: those of pictures that are seen together follow each other."""
        rows = self.config.item_rows
        for number, count in enumerate(filled):
            yield number, 0, count
        for number, count in enumerate(filled):
            if count < rows:
                yield number, count, rows - count
