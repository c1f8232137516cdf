"""Models without a prompt rule of their own: ids and tensors are those of the checkpoint's own processor."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from services.families import registry
from shared.artifacts import bundle
from shared.artifacts.small_tensor import array_of
from shared.artifacts.store import ArtifactReader
from shared.checkpoint.processor import SPAN_IDS
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, PixelFormat
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    GetPixelsRequest,
    Media,
    MediaOptions,
    Part,
    PrepareRequest,
    PrepareResponse,
    Video,
)
from tests.support.checkpoints import GENERIC, generic, make_checkpoint
from tests.support.preprocess.service import (
    PreprocessMaker,
    file_of,
    ids_of,
    image,
    picture,
    text,
    turn,
)

SIZES = [(28, 28), (64, 48), (100, 70), (31, 300), (640, 33), (250, 251), (500, 375)]
FIELDS = {
    "llava_onevision": {"image_sizes", "batch_num_images"},
    "qwen3_vl": {"image_grid_thw"},
    "molmo2": {"image_grids", "image_num_crops"},
    "ernie4_5_vl_moe": {"image_grid_thw"},
}


def processed(folder: Path, answer: PrepareResponse, *pictures: PIL.Image.Image) -> Any:
    """What the checkpoint's processor makes of the rendered text."""
    options = {"return_tensors": "np", "add_special_tokens": False}
    return generic.processor(folder)(text=[answer.text], images=list(pictures), **options)


async def tensors_of(item: MediaItem) -> bundle.Tensors:
    """An item's bundle."""
    assert item.format == PixelFormat.PIXEL_FORMAT_BUNDLE
    reader = ArtifactReader()
    try:
        return bundle.unpack(await reader.open(item.pixels))
    finally:
        await reader.close()


def rows_of(items: Sequence[MediaItem]) -> list[int]:
    """The places in the prompt that take an embedding row."""
    return [
        item.offset + run.start + place
        for item in items
        for run in item.embed_runs or [EmbedRun(start=0, length=item.length)]
        for place in range(run.length)
    ]


@pytest.mark.parametrize("family", GENERIC)
async def test_ids_and_tensors_are_those_of_the_processor(
    family: str, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = make_checkpoint(tmp_path, family)
    taking = generic.row_ids(folder)
    async with make_preprocess(folder, max_model_len=4096) as service:
        for number, size in enumerate(SIZES):
            seen = picture(*size, seed=number)
            message = turn("user", text("See "), image(file_of(seen)), text("\n\nand say, what?"))
            answer = await service.chat(message)
            expected, ids = processed(folder, answer, seen), ids_of(answer)
            assert ids == expected["input_ids"][0].tolist()
            assert rows_of(answer.media) == np.flatnonzero(np.isin(ids, taking)).tolist()
            (item,) = answer.media
            assert item.rows == np.isin(ids, taking).sum()
            made = dict(await tensors_of(item))
            assert "pixel_values" in made
            own = made.pop(SPAN_IDS, None)
            assert own is None or own.tolist() == [token for token in ids if token in taking]
            for name, values in made.items():
                np.testing.assert_array_equal(values, expected[name], err_msg=name)
            few = {name for name in made if name.endswith("pooling") and made[name].size <= 64}
            assert set(item.fields) == FIELDS.get(family, set()) | few
            for name in item.fields:
                np.testing.assert_array_equal(array_of(item.fields[name]), made[name])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.full if number else ())
        for number, name in enumerate(GENERIC)
        if name not in generic.MOST_IMAGES
    ],
)
async def test_several_images_stand_each_in_its_place(
    family: str, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = make_checkpoint(tmp_path, family)
    seen = [picture(100, 70), picture(31, 64, seed=1)]
    files = [image(file_of(one)) for one in seen]
    async with make_preprocess(folder, max_model_len=4096) as service:
        first = turn("user", files[0], text("then "), files[1])
        answer = await service.chat(first, turn("assistant", text("so")), turn("user", files[0]))
        expected = processed(folder, answer, *seen, seen[0])
        assert ids_of(answer) == expected["input_ids"][0].tolist()
        taking = generic.row_ids(folder)
        places = np.isin(ids_of(answer), taking)
        assert rows_of(answer.media) == np.flatnonzero(places).tolist()
        assert answer.media[0].digest == answer.media[2].digest != answer.media[1].digest
        again = await service.stub.GetPixels(GetPixelsRequest(media=answer.media[1]))
        assert again.pixels.digest == answer.media[1].digest
        written = await service.chat(turn("user", text("<image> <start_of_image> <|image_pad|>")))
        assert not written.media and not np.isin(taking, ids_of(written)).any()


async def test_the_digest_of_an_item_tells_of_its_processor(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    message = turn("user", image(file_of(picture())))
    digests = set()
    for number, length in enumerate((4, 4, 5)):
        folder = make_checkpoint(tmp_path / str(number), "idefics3")
        settings = {"processor_class": "Idefics3Processor", "image_seq_len": length}
        (folder / "processor_config.json").write_text(json.dumps(settings))
        async with make_preprocess(folder, f"m{number}", max_model_len=4096) as service:
            digests.add((await service.chat(message)).media[0].digest)
    assert len(digests) == 2


async def test_videos_are_refused(tmp_path: Path, make_preprocess: PreprocessMaker) -> None:
    folder = make_checkpoint(tmp_path, "llava_onevision")
    video = Part(video=Video(frames=[Media(data=file_of(picture()))], field="v"))
    async with make_preprocess(folder, max_model_len=4096) as service:
        with pytest.raises(InvalidRequest, match="takes no videos"):
            await service.chat(turn("user", video))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"processor_class": "NovelProcessor"}, "no processor NovelProcessor"),
        pytest.param(
            {"processor_class": "WhisperProcessor"}, "feature_extractor", marks=pytest.mark.full
        ),
        ({"processor_class": "PixtralProcessor"}, "PixtralProcessor cannot run here: .*torch"),
        ({"processor_class": "Qwen3VLProcessor"}, "fails on a picture"),
        pytest.param(
            {"processor_class": "PaliGemmaProcessor"}, "fails on a picture", marks=pytest.mark.full
        ),
    ],
)
async def test_a_processor_that_cannot_be_used_is_refused_at_start(
    tmp_path: Path, make_preprocess: PreprocessMaker, settings: dict[str, Any], reason: str
) -> None:
    folder = make_checkpoint(tmp_path, "idefics3")
    (folder / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidRequest, match=reason):
        async with make_preprocess(folder, max_model_len=4096):
            pass


async def test_what_does_more_than_the_processor_is_refused_at_start(
    tmp_path: Path, make_preprocess: PreprocessMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "idefics3")
    finish = "tests.support.checkpoints.generic:one_more"
    own = generic.with_overrides("Idefics3ForConditionalGeneration", finish=finish)
    find = registry.find
    monkeypatch.setattr(registry, "find", lambda c: replace(own, text_types=find(c).text_types))
    with pytest.raises(InvalidRequest, match="a prompt rule of its own"):
        async with make_preprocess(folder, max_model_len=4096):
            pass


@pytest.mark.parametrize(
    ("family", "options", "wrong", "field"),
    [
        (
            "qwen3_vl",
            {"size": {"shortest_edge": 256, "longest_edge": 3000}},
            {"size": {"longest_edge": 10241}},
            "mm_processor_kwargs.size.longest_edge",
        ),
        (
            "idefics3",
            {"do_image_splitting": False},
            {"do_pan_and_scan": True},
            "mm_processor_kwargs.do_pan_and_scan",
        ),
    ],
)
async def test_options_of_a_request_are_those_of_the_processor(
    family: str,
    options: dict[str, Any],
    wrong: dict[str, Any],
    field: str,
    tmp_path: Path,
    make_preprocess: PreprocessMaker,
) -> None:
    folder = make_checkpoint(tmp_path, family)
    shown = picture(250, 120)

    async def prepared(service: Any, asked: dict[str, Any]) -> PrepareResponse:
        conversation = Conversation(messages=[turn("user", image(file_of(shown)), text("What?"))])
        how = MediaOptions(mm_processor_kwargs_json=json.dumps(asked))
        answer: PrepareResponse = await service.prepare(
            PrepareRequest(conversation=conversation, media_options=how)
        )
        return answer

    async with make_preprocess(folder, max_model_len=4096) as service:
        usual, answer = await prepared(service, {}), await prepared(service, options)
        made = generic.processor(folder)(
            text=[answer.text],
            images=[shown],
            return_tensors="np",
            add_special_tokens=False,
            **options,
        )
        assert ids_of(answer) == np.asarray(made["input_ids"])[0].tolist()
        assert len(ids_of(answer)) < len(ids_of(usual))
        assert answer.media[0].digest != usual.media[0].digest
        with pytest.raises(InvalidRequest) as caught:
            await prepared(service, wrong)
        assert caught.value.metadata["field"] == field
