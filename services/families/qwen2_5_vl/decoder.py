"""Qwen2.5-VL: Qwen2-VL's decoder, with positions that follow a video's time in seconds."""

from collections.abc import Mapping
from typing import Any

from services.families.qwen2_vl.decoder import Qwen2VL, is_video
from tessera.common.v1.media_pb2 import MediaItem


class Qwen2_5VL(Qwen2VL):
    """Bai et al., 2025."""

    _tokens_per_second = 4

    def positions_per_step(self, item: MediaItem) -> float:
        """`tokens_per_second` positions for each second of a video; images have no time."""
        return self._tokens_per_second * item.seconds_per_grid if is_video(item) else 1.0

    def _read_vision(self, vision: Mapping[str, Any]) -> None:
        super()._read_vision(vision)
        self._tokens_per_second = int(vision.get("tokens_per_second") or 4)
