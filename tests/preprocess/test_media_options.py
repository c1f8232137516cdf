"""What a request sets of how its media are processed, and names that it gives to them."""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import pytest_asyncio
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.launcher.redis.embedded_redis import EmbeddedRedis
from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.media.processor_config import read_processor_config
from services.preprocess.prompt.item_options import selection
from services.preprocess.settings import PreprocessSettings
from shared.artifacts.store import ArtifactReader
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem, Modality
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
from tests.support.checkpoints import make_checkpoint
from tests.support.pictures import animation, png
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    ids_of,
    image,
    picture,
    running,
    turn,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST = 28 * 28 * 64
SIZES = [(28, 28), (100, 70), (31, 300), (500, 375), (640, 33)]
IMAGE = Part(media=Media(field="messages[0].content[0].image_url"))
FRAMES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"shortest_edge": 56 * 56, "longest_edge": MOST}
    folder = tmp_path_factory.mktemp("options")
    return make_checkpoint(folder, "qwen2_vl", images={"size": size})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(folder: Path, redis_server: EmbeddedRedis) -> AsyncIterator[RunningPreprocess]:
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as place:
        settings = PreprocessSettings(
            model=folder,
            listen=f"unix:{place}/p.sock",
            artifact_dir=Path(place) / "artifacts",
            media_workers=1,
            redis_url=redis_server.url,
            served_model_name="m",
            max_model_len=4096,
            max_video_frames=8,
        )
        async with running(settings) as opened:
            yield opened


async def prepared(
    service: RunningPreprocess,
    *parts: Part,
    names: tuple[str, ...] = (),
    tenant: str = "one",
    reading: Any = None,
    **processor: Any,
) -> PrepareResponse:
    options = MediaOptions(
        mm_processor_kwargs_json=json.dumps(processor) if processor else "",
        media_io_kwargs_json=json.dumps(reading) if reading else "",
    )
    conversation = Conversation(messages=[turn("user", *parts)], item_names=names)
    asked = options if processor or reading else None
    return await service.prepare(
        PrepareRequest(conversation=conversation, media_options=asked, tenant=tenant)
    )


async def refusal(service: RunningPreprocess, *parts: Part, **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await prepared(service, *parts, **more)
    return caught.value


async def pixels_of(service: RunningPreprocess, item: MediaItem) -> Any:
    answer = await service.stub.GetPixels(GetPixelsRequest(media=item))
    reader = ArtifactReader()
    try:
        return np.array(await reader.open(answer.pixels))
    finally:
        await reader.close()


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 28 * 28 * 9},
        {"min_pixels": 28 * 28 * 20, "max_pixels": 28 * 28 * 40},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 5}},
        {"size": {"longest_edge": MOST}, "min_pixels": 28 * 28 * 30},
    ],
)
@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
async def test_pictures_are_those_of_transformers_processor(
    service: RunningPreprocess, folder: Path, options: dict[str, Any]
) -> None:
    processor: Any = Qwen2VLImageProcessorPil.from_dict(read_processor_config(folder))
    asked = dict(options)
    if "size" in asked:  # transformers wants both edges
        asked["size"] = {"shortest_edge": 56 * 56, **asked["size"]}
    for number, (width, height) in enumerate(SIZES):
        shown = picture(width, height, number)
        made = processor(
            images=shown, return_tensors="np", do_rescale=False, do_normalize=False,
            temporal_patch_size=1, **asked,
        )  # fmt: skip
        answer = await prepared(service, image(file_of(shown)), **options)
        [item] = answer.media
        grid = (item.grid_t, item.grid_h, item.grid_w)
        assert grid == tuple(made["image_grid_thw"][0])
        assert item.rows == item.length == np.prod(grid) // 4
        pixels = await pixels_of(service, item)
        assert (pixels == made["pixel_values"].astype(np.uint8)).all()


async def test_items_with_other_options_are_other_items(service: RunningPreprocess) -> None:
    """Also where they are made again from what is stored, elsewhere."""
    file = image(file_of(picture(300, 300)))
    [plain] = (await prepared(service, file)).media
    [less] = (await prepared(service, file, max_pixels=28 * 28 * 9)).media
    [even_less] = (await prepared(service, file, max_pixels=28 * 28 * 5)).media
    digests = {item.digest for item in (plain, less, even_less)}
    assert len(digests) == 3 == len({i.source_digest for i in (plain, less, even_less)})
    assert (less.rows, even_less.rows) == (9, 4) and plain.rows > 9
    [again] = (await prepared(service, file, max_pixels=28 * 28 * 9)).media
    assert again.digest == less.digest
    assert (await prepared(service, file, min_pixels=None)).media[0].digest == plain.digest


async def test_frames_of_videos_are_as_many_as_asked_for(service: RunningPreprocess) -> None:
    file = animation([png(number, (56, 56)) for number in range(FRAMES)], 500)
    video = Part(video=Video(file=Media(data=file), field="video"))

    async def steps(reading: Any = None, **processor: Any) -> int:
        answer = await prepared(service, video, reading=reading, **processor)
        return answer.media[0].grid_t

    assert await steps() == 4  # 8 frames, the server's limit
    assert await steps({"video": {"num_frames": 6}}) == 3
    assert await steps(num_frames=6) == 3
    assert await steps({"video": {"fps": 1}}) == 3  # of 6 seconds
    assert await steps(fps=0.1, min_frames=2) == 1
    assert await steps(max_frames=4) == 2
    smaller = await prepared(service, video, max_pixels=28 * 28)
    assert smaller.media[0].grid_h == 2 and smaller.media[0].grid_t == 4


@pytest.mark.parametrize("total", [5, 24, 97])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
async def test_frames_are_chosen_as_transformers_chooses_them(total: int, count: int) -> None:
    rounded = round(count / 2) * 2
    chosen = selection(FrameSelection(), {"num_frames": ("f", count)}, 128).choose(total, 3.0)
    if rounded == 0:
        assert chosen == [index * total // 2 for index in range(2)]
    elif rounded < total:
        assert chosen == np.arange(0, total, total / rounded).astype(int).tolist()
    else:
        assert chosen == list(range(total))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_pixels": MOST + 1}, "mm_processor_kwargs.max_pixels"),
        ({"min_pixels": 0}, "mm_processor_kwargs.min_pixels"),
        ({"max_pixels": "many"}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": True}, "mm_processor_kwargs.max_pixels"),
        ({"size": 5}, "mm_processor_kwargs.size"),
        ({"size": {"height": 5}}, "mm_processor_kwargs.size.height"),
        ({"min_pixels": 40_000, "max_pixels": 30_000}, "mm_processor_kwargs.max_pixels"),
        ({"max_dynamic_patch": 3}, "mm_processor_kwargs.max_dynamic_patch"),
        ({"num_frames": 9}, "mm_processor_kwargs.num_frames"),
        ({"reading": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps"),
        ({"reading": {"video": {"num_frames": 2, "fps": 1}}}, "media_io_kwargs.video.num_frames"),
        ({"reading": {"video": {"fps": 1}}, "fps": 1}, "mm_processor_kwargs.fps"),
        ({"reading": {"audio": {}}}, "media_io_kwargs.audio"),
        ({"reading": {"image": {"mode": "RGB"}}}, "media_io_kwargs.image.mode"),
        ({"max_frames": 2}, "mm_processor_kwargs.max_frames"),
    ],
)
async def test_what_is_unknown_or_beyond_a_limit_is_refused_by_its_name(
    service: RunningPreprocess, options: dict[str, Any], field: str
) -> None:
    error = await refusal(service, image(file_of(picture())), **options)
    assert error.metadata["field"] == field and error.message.startswith(field)
    if field.endswith("patch"):
        assert "qwen2_vl" in error.message and "max_pixels" in error.message


async def test_long_pictures_are_not_stretched_beyond_the_limit(
    service: RunningPreprocess,
) -> None:
    line = image(file_of(PIL.Image.new("RGB", (900, 5))))
    error = await refusal(service, line, min_pixels=MOST)
    assert error.metadata["field"] == "mm_processor_kwargs"


async def test_frames_that_were_sent_are_all_shown(service: RunningPreprocess) -> None:
    frames = [Media(data=png(number, (56, 56))) for number in range(2)]
    video = Part(video=Video(frames=frames, field="video"))
    error = await refusal(service, video, num_frames=2)
    assert "all of them are shown" in error.message and error.metadata["field"] == "video"


async def test_other_families_have_their_own_options(
    make_preprocess: PreprocessMaker, clip_folder: Path, tmp_path: Path
) -> None:
    async with make_preprocess(clip_folder, "clip") as service:
        error = await refusal(service, image(file_of(picture())), max_pixels=100)
        assert "llava" in error.message and "it has none" in error.message
    tiled = make_checkpoint(tmp_path / "tiled", "internvl_chat")
    (tiled / "config.json").write_text(
        json.dumps({
            **json.loads((tiled / "config.json").read_text()),
            "min_dynamic_patch": 1, "max_dynamic_patch": 6,
        })
    )  # fmt: skip
    shown = image(file_of(picture(400, 130)))
    async with make_preprocess(tiled, "tiles", max_model_len=4096) as service:
        rows = [
            (await prepared(service, shown, **options)).media[0].rows
            for options in (
                {}, {"max_dynamic_patch": 2}, {"max_patches": 1}, {"dynamic_image_size": False},
            )
        ]  # fmt: skip
        assert rows == [16, 12, 4, 4]  # of tiles and the whole, 4 each
        for options, name in (
            ({"max_dynamic_patch": 7}, "max_dynamic_patch"),
            ({"max_patches": 2, "max_dynamic_patch": 2}, "max_patches"),
            ({"min_patches": 3, "max_patches": 2}, "min_patches"),
            ({"crop_to_patches": 1}, "crop_to_patches"),
        ):
            error = await refusal(service, shown, **options)
            assert error.metadata["field"] == f"mm_processor_kwargs.{name}"


async def test_a_name_stands_for_bytes_that_its_tenant_has_sent(
    service: RunningPreprocess,
) -> None:
    file = image(file_of(picture(200, 100)))
    sent = await prepared(service, file, names=("cat",))
    again = await prepared(service, IMAGE, names=("cat",))
    assert ids_of(again) == ids_of(sent) and again.media[0].digest == sent.media[0].digest
    # Options are those of each request, not of the one that brought the bytes.
    [small] = (await prepared(service, IMAGE, names=("cat",), max_pixels=28 * 28)).media
    [plain] = (await prepared(service, IMAGE, names=("cat",))).media
    assert (small.rows, plain.digest) == (1, sent.media[0].digest)
    for tenant, name in (("two", "cat"), ("one", "dog")):
        error = await refusal(service, IMAGE, names=(name,), tenant=tenant)
        assert error.reason == "UNKNOWN_UUID" and "send the item's bytes again" in error.message
        assert error.metadata["field"] == IMAGE.media.field
    other = await prepared(service, image(file_of(picture(50, 50))), names=("cat",))
    renamed = await prepared(service, IMAGE, names=("cat",))
    assert renamed.media[0].digest == other.media[0].digest


async def test_videos_have_names_too(service: RunningPreprocess) -> None:
    file = animation([png(number, (56, 56)) for number in range(4)], 500)
    named = Part(video=Video(field="video", modality=Modality.MODALITY_VIDEO))
    sent = await prepared(service, Part(video=Video(file=Media(data=file))), names=("clip",))
    again = await prepared(service, named, names=("clip",))
    assert again.media[0].digest == sent.media[0].digest
    [two] = (await prepared(service, named, names=("clip",), num_frames=2)).media
    assert two.grid_t == 1
    for part, name in ((IMAGE, "clip"), (named, "pic")):
        await prepared(service, image(file_of(picture())), names=("pic",))
        error = await refusal(service, part, names=(name,))
        assert error.reason == "WRONG_UUID"
