"""Videos sent as lists of frames, through preprocess, tower and decoder: the tokens of transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.preprocess.media import frames
from services.preprocess.media.processor_config import read_processor_config
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import pixel_item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.net.rpc.errors import calling
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tessera.preprocess.v1.preprocess_pb2 import GetPixelsRequest, Media, Part, Video
from tests.support.checkpoints import load_config, load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.mrope import parts_of, published_positions
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    running_decoder,
)
from tests.support.preprocess.pixels import pixel_values
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    ids_of,
    image,
    picture,
    text,
    turn,
)

FIELD = "messages[0].content[0].video"
MADE_UP: Any = 9  # a modality of some later version


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def video(files: list[bytes], seconds_per_frame: float = 0.0) -> Part:
    media = [Media(data=file) for file in files]
    return Part(video=Video(frames=media, seconds_per_frame=seconds_per_frame, field=FIELD))


def files(count: int, size: tuple[int, int] = (80, 60)) -> list[bytes]:
    return [file_of(picture(*size, seed=number)) for number in range(count)]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
async def test_five_frames_and_an_image(
    family: str, tmp_path: Path, short_tmp: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = make_checkpoint(tmp_path, family)
    if family == "qwen2_5_vl":  # a video's frames have bounds of their own
        bounds = {"min_pixels": 28 * 28, "max_pixels": 4 * 28 * 28}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(bounds))
    store = ArtifactStore(short_tmp / "embeddings", "producer", "")
    async with make_preprocess(folder) as service:
        parts = [text("the"), video(files(5), 1.5), text("red"), image(file_of(picture(90, 40)))]
        prepared = await service.chat(turn("user", *parts))
        pixels = [await pixel_values(item) for item in prepared.media]
    first, second = prepared.media
    assert (first.modality, second.modality) == (
        Modality.MODALITY_VIDEO,
        Modality.MODALITY_IMAGE,
    )
    assert first.rows == (3 * 2 if family == "qwen2_5_vl" else 3 * 6)
    assert first.grid_t == 3 and first.seconds_per_grid == 3.0
    grids = [(item.grid_t, item.grid_h, item.grid_w) for item in (first, second)]
    assert [len(values) for values in pixels] == [int(np.prod(grid)) for grid in grids]

    model = load_encoder(Checkpoint(folder), CpuDevice(torch.float32))
    assert model is not None
    rows = model.encode([pixel_item(*pair) for pair in zip(pixels, grids, strict=True)])
    prompt = ids_of(prepared)
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        refs = [
            store.put(item.digest, found.numpy())
            for item, found in zip(prepared.media, rows, strict=True)
        ]
        stream.ready.clear()
        await stream.run(make_plan(fetch=refs))
        while len(stream.ready) < 2:
            await stream.next_message()
        asked = Text(0, prompt, greedy(), media=list(prepared.media))
        await NaiveScheduler(stream).generate([asked], 10, chunk=13)
    config = load_config(folder)
    kinds = {config["image_token_id"]: 1, config["video_token_id"]: 2}
    speed = config["vision_config"].get("tokens_per_second")
    positions = published_positions(parts_of(len(prompt), prepared.media, speed))
    expected = load_reference(folder).generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        pixel_values_videos=torch.from_numpy(pixels[0]),
        video_grid_thw=torch.tensor([grids[0]]),
        pixel_values=torch.from_numpy(pixels[1]),
        image_grid_thw=torch.tensor([grids[1]]),
        mm_token_type_ids=torch.tensor([[kinds.get(token, 0) for token in prompt]]),
        position_ids=torch.tensor(positions).T[:, None],
        max_new_tokens=len(asked.output),
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = expected.sequences[0, len(prompt) :].tolist()
    assert_same_up_to_ties(asked.output, tokens, torch.cat(expected.scores))


async def test_frames_get_their_temporal_positions(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = make_checkpoint(tmp_path, "qwen2_vl")
    processor = Qwen2VLImageProcessorPil.from_dict(read_processor_config(folder))
    pictures = [picture(80, 60, seed=number) for number in range(3)]
    async with make_preprocess(folder) as service:
        again, once = [
            await service.chat(turn("user", video([file_of(p) for p in pictures], pace)))
            for pace in (0.5, 0.25)
        ]
        found = await pixel_values(again.media[0])
    alone = [processor(images=p, return_tensors="np")["pixel_values"] for p in pictures]
    count = len(alone[0])
    assert found.shape == (2 * count, alone[0].shape[1])
    apart = found.reshape(2, count, 3, 2, -1)
    for step, place, frame in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        expected = alone[frame].reshape(count, 3, 2, -1)[:, :, 0]
        np.testing.assert_array_equal(apart[step][:, :, place], expected)
    # Positions depend on the pace, so cached blocks must not be shared between the two.
    assert again.media[0].digest != once.media[0].digest


async def test_videos_that_are_refused(tmp_path: Path, make_preprocess: PreprocessMaker) -> None:
    refused = [
        (video([]), "VIDEO_FRAMES"),
        (video(files(4)), "VIDEO_FRAMES"),
        (video([*files(1), file_of(picture(20, 20))]), "VIDEO_UNUSABLE"),
        (video([b"nonsense"]), "IMAGE_FORMAT"),
        (video(files(2), -1.0), "BAD_VIDEO"),
        (image(frames.pack(files(1), 1.0), FIELD), "IMAGE_FORMAT"),
    ]
    folder = make_checkpoint(tmp_path, "qwen2_vl")
    async with make_preprocess(folder, max_video_frames=3) as service:
        for part, reason in refused:
            with pytest.raises(InvalidRequest) as caught:
                await service.chat(turn("user", part))
            assert caught.value.reason == reason and caught.value.metadata["field"] == FIELD
        assert (await service.chat(turn("user", video(files(3))))).media[0].grid_t == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_for_images_takes_no_videos(clip_service: RunningPreprocess) -> None:
    with pytest.raises(InvalidRequest, match="takes no videos"):
        await clip_service.chat(turn("user", video(files(2))))


async def test_a_modality_of_a_later_version_is_never_taken_for_an_image(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(make_checkpoint(tmp_path, "qwen2_vl")) as service:
        later = image(file_of(picture(40, 40)), FIELD)
        later.media.modality = MADE_UP
        other_video, later_video = video(files(2)), video(files(2))
        other_video.video.modality = Modality.MODALITY_IMAGE
        later_video.video.modality = MADE_UP
        for part, reason in (
            (later, "UNKNOWN_MODALITY"),
            (later_video, "UNKNOWN_MODALITY"),
            (other_video, "BAD_MODALITY"),
        ):
            with pytest.raises(InvalidRequest, match="modality") as caught:
                await service.chat(turn("user", part))
            assert caught.value.reason == reason and caught.value.metadata["field"] == FIELD
        whole = (await service.chat(turn("user", image(file_of(picture(40, 40)))))).media[0]
        whole.modality = MADE_UP
        with pytest.raises(InvalidRequest, match="modality 9"), calling("preprocess"):
            await service.stub.GetPixels(GetPixelsRequest(media=whole))


async def test_parts_and_items_of_older_versions_say_no_modality(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = make_checkpoint(tmp_path, "qwen2_vl")
    async with make_preprocess(folder, "first") as service:
        parts = [video(files(3)), image(file_of(picture(40, 40)))]
        assert not parts[0].video.modality and not parts[1].media.modality
        items = (await service.chat(turn("user", *parts))).media
        assert [item.modality for item in items] == [
            Modality.MODALITY_VIDEO,
            Modality.MODALITY_IMAGE,
        ]
        before = [await pixel_values(item) for item in items]
    async with make_preprocess(folder, "second") as service:
        for item, expected in zip(items, before, strict=True):
            older = MediaItem(digest=item.digest, source_digest=item.source_digest)
            made = await service.stub.GetPixels(GetPixelsRequest(media=older))
            item.pixels.CopyFrom(made.pixels)
            np.testing.assert_array_equal(await pixel_values(item), expected)


def test_a_truncated_file_of_frames_is_refused() -> None:
    data = frames.pack([b"one", b"three"], 2.0)
    assert frames.unpack(data) == ([b"one", b"three"], 2.0)
    for broken in (data[:-1], data[:18], data + b"x", frames.pack([], 1.0)):
        with pytest.raises(ValueError):
            frames.unpack(broken)
