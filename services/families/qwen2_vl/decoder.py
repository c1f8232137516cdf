"""Qwen2-VL: Qwen2's block with rotary positions of three axes (M-RoPE).

A token of text has one position on all axes. Inside an image or a video an axis counts time, rows
or columns, all from the position where the item begins; the text behind it goes on behind the
largest position that the item has on any axis, which for a long video is a time. The models were
trained so. The frequencies of a head are divided among the axes by `mrope_section`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.llama import Llama
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.decoder import DecoderConfig
from shared.prompts.modality import modality_of
from tessera.common.v1.media_pb2 import MediaItem, Modality

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Positions = np.ndarray[tuple[int, int], np.dtype[np.int32]]
_MOST_POSITIONS = 1 << 30


class Qwen2VL(Llama):
    """Wang et al., 2024."""

    rotary_axes = 3
    REACH: ClassVar[int] = 2  # in a video time may run faster than tokens

    def __init__(self, config: DecoderConfig, ops: BaseOps, max_model_len: int) -> None:
        super().__init__(config, ops, max_model_len)
        axes = [axis % 3 for axis, size in enumerate(config.rope.sections()) for _ in range(size)]
        axes += [0] * (self._cos.shape[-1] // 2 - len(axes))  # what is not rotated
        # The axis of each element of a head; the second half repeats the first's frequencies.
        self._axis = torch.tensor([*axes, *axes], device=ops.device)
        self._merge = 2
        self._longest = max_model_len

    @classmethod
    def load(cls, checkpoint: Checkpoint, ops: BaseOps, max_model_len: int) -> "Qwen2VL":
        """Also takes from the tower's configuration how many patches one token stands for."""
        model = super().load(checkpoint, ops, max_model_len)
        assert isinstance(model, Qwen2VL)
        model._read_vision(checkpoint.vision_config or {})
        return model

    def positions(self, prompt: Ids, media: Sequence[MediaItem]) -> tuple[Positions, int]:
        """See `DecoderModel.positions`. Raises InvalidRequest for a grid that is not its span's."""
        prompt_len = len(prompt)
        found = np.empty((3, prompt_len), np.int32)
        done = place = 0  # tokens that have positions, and the next one
        for item in sorted(media, key=lambda item: item.offset):
            inside = self._inside(item)
            text = item.offset - done
            if text < 0:
                raise _bad_media("the prompt's media overlap")
            found[:, done : item.offset] = np.arange(place, place + text)
            place += text
            done = item.offset + item.length
            found[:, item.offset : done] = inside + place
            place += int(inside.max()) + 1
        found[:, done:] = np.arange(place, place + prompt_len - done)
        delta = int(found.max()) + 1 - prompt_len
        if delta > self._longest * (self.REACH - 1):
            raise InvalidRequest(
                "TOO_LONG",
                f"the prompt's media reach position {found.max()}, far beyond its {prompt_len}"
                " tokens: send a shorter video",
                field="media",
            )
        return found, delta

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Each section of the frequencies turns by its own axis; positions [3, T]."""
        places = positions.index_select(0, self._axis).T  # [T, D]
        cos, sin = (table[:, 0].gather(0, places) for table in (self._cos, self._sin))
        return cos[:, None], sin[:, None]

    def positions_per_step(self, item: MediaItem) -> float:
        """Positions between two steps of time; version 2 counts steps, whatever they last."""
        return 1.0

    def _read_vision(self, vision: Mapping[str, Any]) -> None:
        self._merge = int(vision.get("spatial_merge_size") or 2)

    def _inside(self, item: MediaItem) -> Positions:
        """Positions [3, length] of an item's tokens, from 0."""
        steps, rows, columns = (
            item.grid_t,
            item.grid_h // self._merge,
            item.grid_w // self._merge,
        )
        if min(steps, rows, columns) < 1 or steps * rows * columns != item.length:
            raise _bad_media(
                f"a grid of {item.grid_t}x{item.grid_h}x{item.grid_w} patches is not a span of"
                f" {item.length} tokens"
            )
        # In float32, cut off: as transformers does, on whose numbers the models were trained.
        pace = np.float32(self.positions_per_step(item))
        if not 0 <= float(pace) * steps < _MOST_POSITIONS:
            raise _bad_media(f"{item.seconds_per_grid:g} seconds a step are no pace of a video")
        times = (np.arange(steps, dtype=np.float32) * pace).astype(np.int32)
        grid = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
        return np.stack(grid).reshape(3, -1).astype(np.int32)


def is_video(item: MediaItem) -> bool:
    """Whether time passes in an item."""
    return modality_of(item) == Modality.MODALITY_VIDEO


def _bad_media(what: str) -> InvalidRequest:
    return InvalidRequest("INVALID_MEDIA", what, field="media")
