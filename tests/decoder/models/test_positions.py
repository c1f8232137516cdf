"""Rotary positions of three axes on drawn prompts, against the published rule and transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.generic.rope_index import RopeIndex
from services.families import registry
from services.families.family import load_part
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.mrope import Grid, parts_of, published_positions

PACES = {"qwen2_vl": 0, "qwen2_5_vl": 2, "qwen2_5_vl at 25": 25}  # tokens_per_second


@pytest.fixture(scope="module", params=PACES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, pace = request.param.split()[0], PACES[request.param]
    vision = {"tokens_per_second": pace} if pace else {}
    return make_checkpoint(tmp_path_factory.mktemp(family), family, vision=vision)


def load(folder: Path, max_model_len: int = 4096) -> DecoderModel:
    checkpoint = Checkpoint(folder)
    model_class: type[DecoderModel] = load_part(registry.find_decoder(checkpoint).decoder)
    return model_class.load(checkpoint, CpuDevice(torch.float32).ops, max_model_len)


def drawn_prompts() -> Iterator[tuple[int, list[MediaItem]]]:
    """Numbers of tokens and media of 150 prompts."""
    numbers = np.random.default_rng(4)
    for _ in range(150):
        length = int(numbers.integers(0, 9))
        media: list[MediaItem] = []
        for _ in range(numbers.integers(0, 5)):
            video = bool(numbers.random() < 0.5)
            # Often longer than wide: the text behind a video begins behind its last time then.
            steps = int(numbers.integers(1, 30)) if video else 1
            rows, columns = (int(side) for side in numbers.integers(1, 7, 2))
            seconds = float(numbers.choice([0.25, 1.0, 1 / 3, 0.08, 2 / 24])) if video else 0.0
            item = MediaItem(
                modality=Modality.MODALITY_VIDEO if video else Modality.MODALITY_IMAGE,
                offset=length,
                length=steps * rows * columns,
                rows=steps * rows * columns,
                grid_t=steps,
                grid_h=2 * rows,
                grid_w=2 * columns,
                seconds_per_grid=seconds,
            )
            media.append(item)
            length += item.length + int(numbers.integers(1, 9))
        yield max(length, 1), media


def tokens_per_second(folder: Path) -> float | None:
    vision = Checkpoint(folder).vision_config
    assert vision is not None
    return vision.get("tokens_per_second")


def grids(media: list[MediaItem], modality: int) -> torch.Tensor | None:
    found = [[i.grid_t, i.grid_h, i.grid_w] for i in media if i.modality == modality]
    return torch.tensor(found) if found else None


def test_the_rule_of_the_class_gives_the_same_for_images(folder: Path) -> None:
    """What the code of transformers runs by, with the grids of our prompt rule."""
    model, rule = load(folder), RopeIndex.find(load_reference(folder))
    assert rule is not None and rule.axes == 3
    for length, media in drawn_prompts():
        images = [item for item in media if item.modality == Modality.MODALITY_IMAGE]
        prompt = np.zeros(length, np.int64)
        (ours, own), (theirs, other) = model.positions(prompt, images), rule(prompt, images[::-1])
        np.testing.assert_array_equal(theirs, ours)
        assert other == own
    with pytest.raises(InvalidRequest, match="no positions follow"):
        rule(
            np.zeros(9, np.int64),
            [MediaItem(modality=Modality.MODALITY_IMAGE, offset=1, length=4, rows=4)],
        )


def test_an_item_without_a_modality_is_an_image_and_an_unknown_one_nothing(folder: Path) -> None:
    model, rule = load(folder), RopeIndex.find(load_reference(folder))
    assert rule is not None
    item = MediaItem(offset=1, length=4, rows=4, grid_t=1, grid_h=4, grid_w=4)
    item.modality = Modality.MODALITY_IMAGE
    prompt = np.zeros(6, np.int64)
    expected, _ = model.positions(prompt, [item])
    item.ClearField("modality")
    for positions in (model.positions, rule):
        np.testing.assert_array_equal(positions(prompt, [item])[0], expected)
    item.modality = 9  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="modality 9"):  # elsewhere where spans are read
        rule(prompt, [item])


def test_positions_are_those_of_the_published_rule(folder: Path) -> None:
    model = load(folder)
    outran = 0
    for length, media in drawn_prompts():
        parts = parts_of(length, media, tokens_per_second(folder))
        expected = np.array(published_positions(parts)).T
        found, delta = model.positions(np.zeros(length, np.int64), media[::-1])
        np.testing.assert_array_equal(found, expected)
        assert delta == expected.max() + 1 - length
        outran += any(isinstance(part, Grid) and part.outruns for part in parts)
    assert outran > 50


def test_positions_are_those_of_transformers(folder: Path) -> None:
    """Up to the end of the first video whose time is larger than its sides."""
    model, reference = load(folder), load_reference(folder)
    for length, media in drawn_prompts():
        types = np.zeros(length, int)
        for item in media:
            types[item.offset : item.offset + item.length] = item.modality
        more: dict[str, Any] = {}
        if tokens_per_second(folder):
            videos = [item for item in media if item.modality == Modality.MODALITY_VIDEO]
            more["second_per_grid_ts"] = [item.seconds_per_grid for item in videos]
        expected, deltas = reference.model.get_rope_index(
            torch.zeros(1, length, dtype=torch.long),
            torch.from_numpy(types)[None],
            grids(media, Modality.MODALITY_IMAGE),
            grids(media, Modality.MODALITY_VIDEO),
            **more,
        )
        found, delta = model.positions(np.zeros(length, np.int64), media[::-1])
        parts = parts_of(length, media, tokens_per_second(folder))
        ends = [
            item.offset + item.length
            for item, part in zip(media, parts[1::2], strict=True)
            if isinstance(part, Grid) and part.outruns
        ]
        same = min(ends, default=length)
        np.testing.assert_array_equal(found[:, :same], expected[:, 0, :same].numpy())
        assert ends or delta == int(deltas[0])


def test_the_answer_goes_on_behind_a_video_that_ends_the_prompt(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen2_5_vl", vision={"tokens_per_second": 25}))
    video = MediaItem(
        modality=Modality.MODALITY_VIDEO, offset=2, length=3, grid_t=3, grid_h=2, grid_w=2
    )
    video.seconds_per_grid = 1.0
    found, delta = model.positions(np.zeros(5, np.int64), [video])
    assert found.tolist() == [[0, 1, 2, 27, 52], [0, 1, 2, 2, 2], [0, 1, 2, 2, 2]]
    assert 5 + delta == 53


@pytest.mark.parametrize(
    "grid", [(0, 4, 4), (1, 4, 4), (1, 8, 2), (2, 4, 4), (1, -8, -4), (1, 9, 4)]
)
def test_a_grid_that_is_not_its_span_is_refused(folder: Path, grid: tuple[int, int, int]) -> None:
    t, h, w = grid
    item = MediaItem(offset=1, length=7, grid_t=t, grid_h=h, grid_w=w)
    with pytest.raises(InvalidRequest, match="is not a span of 7"):
        load(folder).positions(np.zeros(20, np.int64), [item])


def test_media_that_overlap_are_refused(folder: Path) -> None:
    items = [MediaItem(offset=i, length=4, grid_t=1, grid_h=4, grid_w=4) for i in (2, 5)]
    with pytest.raises(InvalidRequest, match="overlap"):
        load(folder).positions(np.zeros(20, np.int64), items)


@pytest.mark.parametrize("pace", [float("nan"), float("inf"), -1.0, 1e30])
def test_time_goes_forward(tmp_path: Path, pace: float) -> None:
    video = MediaItem(
        modality=Modality.MODALITY_VIDEO, offset=1, length=2, grid_t=2, grid_h=2, grid_w=2
    )
    video.seconds_per_grid = pace
    with pytest.raises(InvalidRequest, match="no pace"):
        load(make_checkpoint(tmp_path, "qwen2_5_vl")).positions(np.zeros(20, np.int64), [video])


def test_a_video_that_outruns_the_rotations_is_refused(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "qwen2_5_vl"), max_model_len=64)
    video = MediaItem(
        modality=Modality.MODALITY_VIDEO, offset=1, length=10, grid_t=10, grid_h=2, grid_w=2
    )
    video.seconds_per_grid = 2.0
    model.positions(np.zeros(20, np.int64), [video])
    video.seconds_per_grid = 5.0
    with pytest.raises(InvalidRequest, match="shorter video"):
        model.positions(np.zeros(20, np.int64), [video])


def test_sections_are_the_frequencies_of_a_head(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 4]}
    folder = make_checkpoint(tmp_path, "qwen2_vl", text={"rope_parameters": rope})
    with pytest.raises(InvalidRequest, match="mrope_section"):
        load(folder)
