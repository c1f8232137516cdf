"""What the worker asks of a decoder, whatever its architecture."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from services.decoder.devices.base.largest import first_largest
from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.layer_spec import LayerSpec
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.steps.encoder_keys import MediaView
from services.decoder.steps.needs import Needs
from services.decoder.steps.step import Step
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.lora.adapter import LoraAdapter
from shared.lora.adapter_file import ADAPTER_FILE
from shared.model_config.decoder import TextSizes
from tessera.common.v1.media_pb2 import MediaItem


class DecoderModel(ABC):
    """A language model over a paged cache. T tokens of several sequences run as one ragged batch."""

    # Axes of rotary positions that `positions` gives; 0: a token's position is its index.
    rotary_axes: int = 0
    # Rows that are added behind the first layers (deepstack): a row of media is 1 + levels times as wide as the model.
    levels: int = 0
    # Ids that tokens in the place of media may have where layers attend to media (`EncoderKeys`), and no token takes an
    # embedding row; 0: they are in the vocabulary like all others.
    media_ids: int = 0
    # Whose code runs the layers.
    code: ClassVar[str] = "native"
    needs: Needs = Needs()
    # Calls of `RankGroup.sum` in a forward of all layers, where there are several ranks.
    sums: int = 0
    # Whether a token's bits depend on nothing else in the batch, where the ops promise that of theirs.
    equal_rows: bool = True
    # Between its logits and those of the model's own class, in standard deviations; None where it was not measured.
    largest_difference: float | None = None
    # Whether it has an output matrix. Without one `logits` and `largest` are not called, and it only gives vectors.
    generates: bool = True
    # float32 [labels, H] on the host: the classification head, where the checkpoint has one.
    score_head: Tensor | None = None

    # Whether its layers have a place for LoRA adapters.
    takes_adapters: ClassVar[bool] = False
    # Those that it has: numbers from 1 on, as `Step.adapters` has them, by `LoraAdapter.lora_id`. Changes with them.
    adapters: Mapping[str, int] = {}

    config: TextSizes
    layers: Sequence[LayerSpec]

    @classmethod
    def check_names(cls, checkpoint: Checkpoint) -> int:
        """How many tensors are the decoder's. Raises InvalidRequest for names that it has no place for. Reads no
        weights."""
        return len(checkpoint.names())

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Checkpoint, ops: BaseOps, max_model_len: int) -> "DecoderModel":
        """Reads the language part of a checkpoint. Raises InvalidRequest naming bad tensors."""

    def require_adapters(self, kind: str) -> None:
        """Raises InvalidRequest where it takes none. kind: see `Checkpoint.kind`."""
        if not self.takes_adapters:
            raise InvalidRequest(
                "UNSUPPORTED_ADAPTER",
                f"--lora-modules, {ADAPTER_FILE}, --allowed-adapter-dir: the code that runs the layers of {kind} here"
                " has no place for adapters: merge one into the weights, or leave flags and file out",
                field="lora_modules",
            )

    def load_adapters(self, checkpoint: Checkpoint, adapters: Mapping[str, LoraAdapter]) -> None:
        """Reads LoRA adapters, given by name. Two names of one adapter are one. Raises InvalidRequest for those that do
        not fit the model, or where it takes none."""
        if adapters:
            self.require_adapters(checkpoint.kind)
        for name, adapter in adapters.items():
            if adapter.lora_id not in self.adapters:
                self.read_adapter(checkpoint, f"the adapter {name!r}", adapter)()

    def read_adapter(
        self, checkpoint: Checkpoint, called: str, adapter: LoraAdapter
    ) -> Callable[[], None]:
        """Reads a LoRA adapter, on any thread, and changes nothing: what is returned adds it to `adapters`, between two
        steps. `called`: what errors call it. Raises InvalidRequest for one that does not fit the model."""
        raise NotImplementedError

    def drop_adapter(self, lora_id: str) -> None:
        """Forgets an adapter, between two steps; no sequence has it."""
        raise NotImplementedError

    def adapter_bytes(self, rank: int) -> int:
        """Memory that an adapter of this rank of all linear layers takes."""
        return 0

    @abstractmethod
    def embed(
        self, ids: Tensor, embeds: Sequence[Tensor], runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Hidden rows [T, H] of token ids [T]; embeds[i] [n, H] replaces runs[i] = (first, n)."""

    def positions(
        self, prompt: "np.ndarray[tuple[int], np.dtype[np.int64]]", media: Sequence[MediaItem]
    ) -> "tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], int]":
        """Rotary positions [axes, tokens] of a prompt's ids [tokens], and what to add for later tokens."""
        return np.arange(len(prompt), dtype=np.int32)[None], 0

    def prefix(self, prompt: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> int:
        """How many tokens at the beginning of a prompt's ids [tokens] see each other, where `needs` says PREFIX_LM."""
        return len(prompt)

    def media_view(self, prompt_len: int, media: Sequence[MediaItem]) -> MediaView:
        """What the tokens of a sequence see of its media, of which there are some, where layers are `EncoderKeys`.
        Raises InvalidRequest for media that are no such."""
        raise NotImplementedError

    @abstractmethod
    def forward(self, hidden: Tensor, step: Step, caches: Sequence[PagedKV]) -> Tensor:
        """Hidden rows [T, H] after the last norm, from those of `embed`; one cache for each layer that is `Paged`, or
        where all are, fewer caches for as many first layers. Layers that are a `State` have it in `step.states`, and
        all their rows write it; those that are `EncoderKeys` have theirs in `step.attending`, None where no token
        attends to any.

        May overwrite `hidden`.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of rows that `forward` returned."""

    @property
    def sketched_rows(self) -> int:
        """Up to how many rows `largest` takes about half the time of `logits` or less; 0 if it never does. Only where a
        row's logits do not depend on the others in the batch."""
        return 0

    def largest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row's logits the index [rows] of the largest, the first of equals, and its value
        [rows], NaN if there is one among them. For those who want no more of them."""
        return first_largest(self.logits(hidden))
