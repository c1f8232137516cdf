"""Embeddings are those of transformers, and stay where they are held."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaForConditionalGeneration

from services.vision_encoder.devices.cpu.device import CpuDevice
from shared.artifacts.embedding_name import embedding_name
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest, NotFound, Overloaded, Precondition, Unavailable
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.common.v1.media_pb2 import MediaItem
from tests.support.preprocess.pixels import pixel_values
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    image,
    picture,
    turn,
)
from tests.support.vision_checkpoints import (
    like_newer_versions,
    like_older_versions,
    llava_checkpoint,
)
from tests.support.vision_encoder.service import EncoderMaker

SIZES = [(80, 60), (40, 90), (56, 56), (300, 200)]


async def items_of(service: RunningPreprocess, count: int = len(SIZES)) -> list[MediaItem]:
    """Media items of different pictures."""
    pictures = [picture(*SIZES[i % len(SIZES)], seed=i) for i in range(count)]
    return [(await service.chat(turn("user", image(file_of(p))))).media[0] for p in pictures]


async def features(folder: Path, items: list[MediaItem]) -> list[np.ndarray[Any, Any]]:
    """What transformers makes of the same pixel values, one image at a time."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.inference_mode():
        for item in items:
            pixels = torch.from_numpy(await pixel_values(item))
            out = model.get_image_features(
                pixel_values=pixels[None],
                vision_feature_layer=model.config.vision_feature_layer,
                vision_feature_select_strategy=model.config.vision_feature_select_strategy,
                return_dict=True,
            )
            found.append(out.pooler_output[0].numpy())
    return found


@pytest.mark.parametrize(
    ("tower", "config"),
    [
        ("clip", {}),
        ("clip", {"vision_feature_layer": [-2, 1], "vision_feature_select_strategy": "full"}),
        ("clip older", {"vision_feature_layer": -1}),
        ("clip newer", {"vision_feature_layer": 2}),
        ("siglip", {"vision_feature_layer": -1}),
        ("siglip older", {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}),
    ],
)
async def test_embeddings_equal_transformers(
    tower: str,
    config: dict[str, Any],
    tmp_path: Path,
    make_encoder: EncoderMaker,
    make_preprocess: PreprocessMaker,
) -> None:
    folder = llava_checkpoint(tmp_path, tower.split()[0], **config)
    async with make_preprocess(folder) as preprocess:
        items = await items_of(preprocess)
        expected = await features(folder, items)
        if "older" in tower:
            like_older_versions(folder)
        if "newer" in tower:
            like_newer_versions(folder)
        async with make_encoder(folder) as encoder:
            together = await asyncio.gather(*(encoder.rows(item) for item in items))
    for item, ours, theirs in zip(items, together, expected, strict=True):
        assert ours.shape == (item.rows, 32)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=5e-5)
    assert not np.allclose(together[0], together[1], atol=1e-3)


async def test_a_row_is_the_same_alone_and_in_a_batch(
    clip_folder: Path,
    siglip_folder: Path,
    make_encoder: EncoderMaker,
    make_preprocess: PreprocessMaker,
) -> None:
    for name, folder in (("c", clip_folder), ("s", siglip_folder)):
        async with (
            make_preprocess(folder, f"p{name}") as preprocess,
            make_encoder(folder, f"a{name}") as alone,
            make_encoder(folder, f"b{name}", max_batch_patches=64) as batched,
        ):
            items = await items_of(preprocess, 7)
            single = [await alone.rows(item) for item in items]
            joined = await asyncio.gather(*(batched.rows(item) for item in items))
        for one, other in zip(single, joined, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.asyncio(loop_scope="module")
async def test_bfloat16(
    clip_folder: Path, make_encoder: EncoderMaker, clip_service: RunningPreprocess
) -> None:
    async with make_encoder(clip_folder, dtype="bfloat16") as encoder:
        items = await items_of(clip_service, 2)
        expected = await features(clip_folder, items)
        response = await encoder.encode(items[0])
        assert response.embeddings.dtype == "bfloat16"
        bits = await encoder.reader.open(response.embeddings)
        rows = torch.tensor(np.array(bits)).view(torch.bfloat16).float().numpy()
    scale = np.abs(expected[0]).max()
    assert np.abs(rows - expected[0]).max() < 0.05 * scale


@pytest.mark.asyncio(loop_scope="module")
async def test_equal_items_are_encoded_once(
    clip_folder: Path, make_encoder: EncoderMaker, clip_service: RunningPreprocess
) -> None:
    async with make_encoder(clip_folder) as encoder:
        items = await items_of(clip_service, 1)
        answers = await asyncio.gather(*(encoder.encode(items[0]) for _ in range(5)))
        again = await encoder.encode(items[0])
    assert {a.embeddings.location.path for a in [*answers, again]} == {
        again.embeddings.location.path
    }
    assert again.cached
    assert again.encode_us == 0
    assert not answers[0].cached
    assert answers[0].encode_us > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_embeddings_are_named_by_weights_and_numerics_and_none_are_made_for_others(
    clip_folder: Path, make_encoder: EncoderMaker, clip_service: RunningPreprocess
) -> None:
    own = content_digest(Checkpoint(clip_folder))
    async with make_encoder(clip_folder) as encoder:
        (item,) = await items_of(clip_service, 1)
        unnamed = (await encoder.encode(item)).embeddings
        named = (await encoder.encode(item, content=own)).embeddings
        assert unnamed.digest == item.digest
        assert named.digest == embedding_name(own, item.digest) != item.digest
        with pytest.raises(NotFound) as refused:
            await encoder.encode(item, content=b"a fine-tune's...")
        assert refused.value.reason == "OTHER_CONTENT"
        numerics = CpuDevice(torch.float32).numerics(True)
        full = (await encoder.encode(item, content=own, numerics=numerics)).embeddings
        assert full.digest == embedding_name(own, item.digest, numerics) != named.digest
        with pytest.raises(NotFound) as refused:
            await encoder.encode(item, content=own, numerics="another machine's")
    assert refused.value.reason == "OTHER_NUMERICS"


@pytest.mark.asyncio(loop_scope="module")
async def test_held_embeddings_stay_and_released_ones_go(
    clip_folder: Path, make_encoder: EncoderMaker, clip_service: RunningPreprocess
) -> None:
    one = 16 * 32 * 4
    async with make_encoder(clip_folder, encoder_cache_bytes=2 * one) as encoder:
        items = await items_of(clip_service, 4)
        first = await encoder.encode(items[0])
        await encoder.encode(items[1])
        with pytest.raises(Overloaded) as caught:
            await encoder.encode(items[2])
        assert caught.value.reason == "ENCODER_CACHE_FULL"
        await encoder.release(items[1], MediaItem(digest=b"unknown"))
        await encoder.encode(items[2], retain_s=0)
        await encoder.encode(items[3])
        assert (await encoder.encode(items[0])).cached
        assert Path(first.embeddings.location.path).exists()
        await encoder.release(items[0], items[3])
        assert not (await encoder.encode(items[1])).cached


async def test_pixels_are_made_again_when_they_are_gone(
    clip_folder: Path, make_encoder: EncoderMaker, make_preprocess: PreprocessMaker
) -> None:
    async with make_encoder(clip_folder) as encoder:
        async with make_preprocess(clip_folder, "p1") as preprocess:
            items = await items_of(preprocess, 2)
            expected = await features(clip_folder, items)
        with pytest.raises((Unavailable, NotFound)):
            await encoder.encode(items[0])
        async with make_preprocess(clip_folder, "p2"):
            while True:  # until the encoder's directory has seen it
                try:
                    rows = await encoder.rows(items[0])
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
            np.testing.assert_allclose(rows, expected[0], rtol=1e-4, atol=5e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_broken_promises(
    clip_folder: Path,
    siglip_folder: Path,
    llama_folder: Path,
    make_encoder: EncoderMaker,
    clip_service: RunningPreprocess,
) -> None:
    items = await items_of(clip_service, 2)
    async with make_encoder(clip_folder, "e1") as encoder:
        wrong = MediaItem()
        wrong.CopyFrom(items[0])
        wrong.rows = 15
        for _ in range(2):  # the first time and from the cache
            with pytest.raises(Precondition) as caught:
                await encoder.encode(wrong)
            assert caught.value.reason == "MEDIA_MISMATCH"
        assert len(await encoder.rows(items[0])) == 16
        with pytest.raises(InvalidRequest):
            await encoder.encode(MediaItem(digest=b"short", rows=1))
        empty = MediaItem(digest=b"0" * 16, rows=16, pixels=ArtifactRef(digest=b"0" * 16))
        with pytest.raises((NotFound, Precondition, Unavailable)):
            await encoder.encode(empty)
    async with make_encoder(siglip_folder, "e2") as encoder:
        with pytest.raises(Precondition) as caught:
            await encoder.encode(items[0])
        assert caught.value.reason == "MEDIA_MISMATCH"
    async with make_encoder(llama_folder, "e3") as encoder:
        with pytest.raises(Precondition) as caught:
            await encoder.encode(items[0])
        assert caught.value.reason == "TEXT_ONLY_MODEL"


@pytest.mark.asyncio(loop_scope="module")
async def test_only_modalities_that_the_model_takes_are_encoded(
    clip_folder: Path, make_encoder: EncoderMaker, clip_service: RunningPreprocess
) -> None:
    (item,) = await items_of(clip_service, 1)
    async with make_encoder(clip_folder, "e1") as encoder:
        later = MediaItem()
        later.CopyFrom(item)
        later.ClearField("modality")  # as an older version wrote it: an image
        assert len(await encoder.rows(later)) == 16
        for number, reason in ((2, "NO_VIDEO_MODEL"), (9, "UNKNOWN_MODALITY")):
            later.modality = number  # type: ignore[assignment]
            with pytest.raises(InvalidRequest) as caught:  # although it is cached as an image
                await encoder.encode(later)
            assert caught.value.reason == reason
        assert "modality 9" in caught.value.message
