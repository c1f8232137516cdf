"""The settings of a checkpoint's image processor, wherever its version of transformers wrote them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from services.families import registry
from services.preprocess.media.frame_selection import FrameSelection
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest


def read_processor_config(folder: Path, family: str = "") -> dict[str, Any]:
    """The family's own settings, or preprocessor_config.json, or the part of processor_config.json that newer versions
    write instead.

    Raises InvalidRequest if there is none of them.
    """
    checkpoint = Checkpoint(folder, family)
    config = registry.find(checkpoint).processor_config(checkpoint)
    if not config:
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"{folder} has no preprocessor_config.json for its images"
        )
    return config


def read_video_size(folder: Path) -> dict[str, Any] | None:
    """Least and most pixels of a video's frames (`shortest_edge`, `longest_edge`), where a file gives them."""
    config = Checkpoint(folder).video_processor_config
    size = dict(config.get("size") or {})
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if config.get(old) is not None:
            size[new] = config[old]
    return size if {"shortest_edge", "longest_edge"} <= size.keys() else None


def read_frame_selection(folder: Path, most: int) -> FrameSelection:
    """The selection of a video's frames, at most `most`: two a second unless a file gives another rate."""
    config = Checkpoint(folder).video_processor_config
    given = {key: config[key] for key in ("fps", "min_frames", "max_frames") if config.get(key)}
    multiple = int(config.get("temporal_patch_size") or FrameSelection.multiple)
    wanted = FrameSelection(**given, multiple=multiple)
    return replace(
        wanted,
        min_frames=min(wanted.min_frames, most),
        max_frames=min(wanted.max_frames, most),
    )
