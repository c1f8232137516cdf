"""Rotary positions of three axes, against transformers on drawn prompts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import load_reference, make_checkpoint

from services.decoder.models import model_class
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.ops import load_ops
from shared.checkpoint import Checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem, Modality

FAMILIES = ("qwen2_vl", "qwen2_5_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def load(folder: Path, max_model_len: int = 4096) -> DecoderModel:
    checkpoint = Checkpoint(folder)
    return model_class(checkpoint).load(checkpoint, load_ops("cpu", torch.float32), max_model_len)


def draw(numbers: np.random.Generator) -> tuple[list[int], list[MediaItem], list[float]]:
    """Token types (text 0, image 1, video 2) of a prompt, its media, and each video's pace."""
    types: list[int] = [0] * int(numbers.integers(0, 9))
    media, paces = [], []
    for _ in range(numbers.integers(0, 5)):
        video = bool(numbers.random() < 0.5)
        steps = int(numbers.integers(1, 6)) if video else 1
        rows, columns = (2 * int(side) for side in numbers.integers(1, 7, 2))
        length = steps * rows * columns // 4
        pace = float(numbers.choice([0.25, 1.0, 1 / 3, 0.08, 2 / 24]))
        media.append(
            MediaItem(
                modality=Modality.MODALITY_VIDEO if video else Modality.MODALITY_IMAGE,
                offset=len(types),
                length=length,
                rows=length,
                grid_t=steps,
                grid_h=rows,
                grid_w=columns,
                seconds_per_grid=pace if video else 0.0,
            )
        )
        paces += [pace] if video else []
        types += [2 if video else 1] * length + [0] * int(numbers.integers(1, 9))
    return types or [0], media, paces


def grids(media: list[MediaItem], modality: int) -> torch.Tensor | None:
    found = [[i.grid_t, i.grid_h, i.grid_w] for i in media if i.modality == modality]
    return torch.tensor(found) if found else None


def test_positions_are_those_of_transformers(folder: Path) -> None:
    model, reference = load(folder), load_reference(folder)
    numbers = np.random.default_rng(4)
    for _ in range(150):
        types, media, paces = draw(numbers)
        more: dict[str, Any] = {}
        if folder.name.startswith("qwen2_5"):
            more["second_per_grid_ts"] = paces
        expected, deltas = reference.model.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.long),
            torch.tensor([types]),
            grids(media, Modality.MODALITY_IMAGE),
            grids(media, Modality.MODALITY_VIDEO),
            **more,
        )
        found, delta = model.positions(len(types), media[::-1])
        np.testing.assert_array_equal(found, expected[:, 0].numpy())
        assert delta == int(deltas[0])


@pytest.mark.parametrize(
    "grid", [(0, 4, 4), (1, 4, 4), (1, 8, 2), (2, 4, 4), (1, -8, -4), (1, 9, 4)]
)
def test_a_grid_that_is_not_its_span_is_refused(folder: Path, grid: tuple[int, int, int]) -> None:
    t, h, w = grid
    item = MediaItem(offset=1, length=7, grid_t=t, grid_h=h, grid_w=w)
    with pytest.raises(InvalidRequest, match="is not a span of 7"):
        load(folder).positions(20, [item])


def test_media_that_overlap_are_refused(folder: Path) -> None:
    items = [MediaItem(offset=i, length=4, grid_t=1, grid_h=4, grid_w=4) for i in (2, 5)]
    with pytest.raises(InvalidRequest, match="overlap"):
        load(folder).positions(20, items)


@pytest.mark.parametrize("pace", [float("nan"), float("inf"), -1.0, 1e30])
def test_time_goes_forward(tmp_path: Path, pace: float) -> None:
    video = MediaItem(
        modality=Modality.MODALITY_VIDEO, offset=1, length=2, grid_t=2, grid_h=2, grid_w=2
    )
    video.seconds_per_grid = pace
    with pytest.raises(InvalidRequest, match="no pace"):
        load(make_checkpoint(tmp_path, "qwen2_5_vl")).positions(20, [video])


def test_a_video_that_outruns_the_rotations_is_refused(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen2_5_vl"), max_model_len=64)
    video = MediaItem(
        modality=Modality.MODALITY_VIDEO, offset=1, length=10, grid_t=10, grid_h=2, grid_w=2
    )
    video.seconds_per_grid = 2.0
    model.positions(20, [video])
    video.seconds_per_grid = 5.0
    with pytest.raises(InvalidRequest, match="shorter video"):
        model.positions(20, [video])


def test_sections_are_the_frequencies_of_a_head(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 4]}
    folder = make_checkpoint(tmp_path, "qwen2_vl", text={"rope_parameters": rope})
    with pytest.raises(InvalidRequest, match="mrope_section"):
        load(folder)
