"""Videos sent as files: selected frames, equality with the same frames sent one by one, and refusals."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.media.image_limits import ImageLimits
from services.preprocess.media.processor_config import read_frame_selection
from services.preprocess.media.video import open_video
from shared.artifacts.store import ArtifactReader
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1.preprocess_pb2 import (
    GetPixelsRequest,
    Media,
    Part,
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
    picture,
    text,
    turn,
)

FIELD = "messages[0].content[1].video_url"
MP4 = b"\x00\x00\x00\x20ftypisom" + bytes(100)


def video_file(data: bytes) -> Part:
    return Part(video=Video(file=Media(data=data), field=FIELD))


def still(files: list[bytes], pace: float) -> Part:
    media = [Media(data=file) for file in files]
    return Part(video=Video(frames=media, seconds_per_frame=pace, field=FIELD))


async def ask(service: RunningPreprocess, part: Part) -> PrepareResponse:
    return await service.chat(turn("user", text("the"), part))


async def pixels(item: MediaItem) -> np.ndarray:
    reader = ArtifactReader()
    try:
        return np.array(await reader.open(item.pixels))
    finally:
        await reader.close()


@pytest.mark.parametrize(
    ("total", "seconds", "chosen"),
    [
        (3, 9.0, [0, 1, 2]),
        (5, 100.0, [0, 1, 2, 3, 4]),
        (9, 0.3, [0, 2, 4, 6]),  # no fewer than four
        (10, 3.9, [0, 1, 3, 5, 6, 8]),  # seven wanted, six an even number
        (60, 2.0, [0, 15, 30, 45]),
        (900, 30.0, [90 * i for i in range(10)]),  # no more than ten
        (40, None, [4 * i for i in range(10)]),  # nothing is known of time
        (7, None, list(range(7))),
    ],
)
def test_frames_are_selected_evenly(total: int, seconds: float | None, chosen: list[int]) -> None:
    frame_selection = FrameSelection(fps=2.0, min_frames=4, max_frames=10, multiple=2)
    assert frame_selection.choose(total, seconds) == chosen


def test_a_checkpoint_may_set_the_frame_selection(tmp_path: Path) -> None:
    assert read_frame_selection(tmp_path, 128) == FrameSelection(2.0, 4, 128, 2)
    wishes = {"fps": 1, "min_frames": 8, "max_frames": 32, "temporal_patch_size": 4}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(wishes))
    assert read_frame_selection(tmp_path, 128) == FrameSelection(1, 8, 32, 4)
    assert read_frame_selection(tmp_path, 6) == FrameSelection(1, 6, 6, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


async def test_a_file_is_the_same_as_its_frames(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    files = [png(number, (80, 60)) for number in range(12)]
    async with make_preprocess(folder, max_video_frames=8, pixel_cache_bytes=1) as service:
        for style in ("PNG", "WEBP", "GIF"):
            whole = await ask(service, video_file(animation(files[:5], 600, style)))
            found = await pixels(whole.media[0])
            frame = await ask(service, still(files[:5], 0.6))
            np.testing.assert_array_equal(found, await pixels(frame.media[0]))
            assert ids_of(whole) == ids_of(frame)
            (item,), (other,) = whole.media, frame.media
            assert (item.grid_t, item.width, item.height) == (3, 80, 60)
            assert item.seconds_per_grid == pytest.approx(1.2)
            assert item.digest != other.digest
        # Twelve in three seconds: six are enough, and they stand twice as far apart.
        whole = await ask(service, video_file(animation(files, 250)))
        assert whole.media[0].seconds_per_grid == pytest.approx(1.0)
        frame = await ask(service, still(files[::2], 0.5))
        expected = await pixels(frame.media[0])
        # From the raw bytes another replica makes the same again, whatever its own limit is.
        async with make_preprocess(folder, "q", max_video_frames=4) as other_room:
            request = GetPixelsRequest(media=whole.media[0])
            again = await other_room.stub.GetPixels(request, timeout=60)
            found = await pixels(MediaItem(pixels=again.pixels))
        np.testing.assert_array_equal(found, expected)


async def test_still_pictures_and_files_without_times(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    files = [png(number, (80, 60)) for number in range(6)]
    async with make_preprocess(folder, max_video_frames=4) as service:
        one = await ask(service, video_file(files[0]))
        assert (one.media[0].grid_t, one.media[0].seconds_per_grid) == (1, 1.0)
        timeless = await ask(service, video_file(animation(files, 0, "GIF")))
        frame = await ask(service, still([files[i] for i in (0, 1, 3, 4)], 0.5))
        found = await pixels(timeless.media[0])
        np.testing.assert_array_equal(found, await pixels(frame.media[0]))
        assert timeless.media[0].seconds_per_grid == 1.0


async def test_files_that_are_refused(folder: Path, make_preprocess: PreprocessMaker) -> None:
    moving = animation([png(number, (80, 60)) for number in range(5)], 100)
    refused = [
        (video_file(b"nonsense"), "VIDEO_FORMAT"),
        (video_file(file_of(picture(90, 90), "JPEG")), "VIDEO_FORMAT"),
        (video_file(moving[:-300]), "VIDEO_DAMAGED"),
        (video_file(animation([png(n, (300, 300)) for n in range(4)], 100)), "VIDEO_TOO_LARGE"),
        (video_file(animation([png(n, (400, 400)) for n in range(2)], 100)), "IMAGE_TOO_LARGE"),
        (video_file(animation([png(0), png(1)], 8_000_000)), "BAD_VIDEO"),
        (video_file(bytes(30_001)), "MEDIA_TOO_LARGE"),
        (still([png(n, (300, 300)) for n in range(4)], 0.5), "VIDEO_TOO_LARGE"),
        (still([png(0), b"nonsense"], 0.5), "IMAGE_FORMAT"),
    ]
    limits = {"max_video_bytes": 30_000, "max_video_pixels": 300_000, "max_image_pixels": 100_000}
    async with make_preprocess(folder, **limits) as service:
        for part, reason in refused:
            with pytest.raises(InvalidRequest) as caught:
                await ask(service, part)
            assert caught.value.reason == reason and FIELD in caught.value.message
            assert caught.value.metadata["field"] == FIELD
        both = still([png(0)], 0.5)
        both.video.file.data = moving
        with pytest.raises(InvalidRequest, match="not both"):
            await ask(service, both)
        assert (await ask(service, video_file(moving))).media[0].grid_t == 2  # others go on


async def test_a_video_larger_than_any_prompt_is_refused_early(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(folder, max_model_len=100) as service:
        with pytest.raises(
            InvalidRequest, match=r"length is 100 tokens\. .* resulted in 1\d\d tokens"
        ):
            await ask(service, video_file(animation([png(n, (200, 160)) for n in range(8)], 500)))


# Of a track's header, in 16.16 and 2.30: where x and y go.
_AS_IT_IS = (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
_A_QUARTER = (0, 1 << 16, 0, -1 << 16, 0, 0, 64 << 16, 0, 1 << 30)


def _mp4(count: int, rate: int, split: bool = False) -> bytes:
    """Frames of growing brightness; with `split`, white on the left and black on the right."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 80, 64, "yuv420p"
        for number in range(count):
            shade = np.full((64, 80, 3), 20 * number, np.uint8)
            if split:
                shade[:, :40], shade[:, 40:] = 255, 0
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


async def test_mp4_where_pyav_is_installed(folder: Path, make_preprocess: PreprocessMaker) -> None:
    data = _mp4(12, 4)  # three seconds
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    async with make_preprocess(folder) as service:
        taken = await ask(service, video_file(data))
        assert (taken.media[0].grid_t, taken.media[0].seconds_per_grid) == (3, 1.0)
        shades = (await pixels(taken.media[0])).reshape(3, -1, 3, 2, 14 * 14).mean((1, 2, 4))
        plain = [file_of(PIL.Image.new("RGB", (80, 64), (40 * number,) * 3)) for number in range(6)]
        expected = await pixels((await ask(service, still(plain, 0.5))).media[0])
        expected = expected.reshape(3, -1, 3, 2, 14 * 14).mean((1, 2, 4))
        np.testing.assert_allclose(shades, expected, atol=0.05)
        for broken, reason in ((data[: len(data) // 2], "VIDEO_DAMAGED"), (MP4, "VIDEO_DAMAGED")):
            with pytest.raises(InvalidRequest) as caught:
                await ask(service, video_file(broken))
            assert caught.value.reason == reason
        with pytest.raises(InvalidRequest) as caught:
            await ask(service, video_file(playlist))
        assert caught.value.reason == "VIDEO_FORMAT"


def test_rotated_videos_of_phones_are_turned_upright() -> None:
    pytest.importorskip("av")
    data = _mp4(2, 4, split=True)
    still, turned = (struct.pack(">9i", *m) for m in (_AS_IT_IS, _A_QUARTER))
    place = data.index(still, data.index(b"tkhd"))
    data = data[:place] + turned + data[place + len(still) :]
    video = open_video(data, FrameSelection(), ImageLimits(max_pixels=10**6))
    for frame in video.frames:
        assert frame.size == (64, 80)
        shades = np.asarray(frame).mean((1, 2))
        assert shades[:30].min() > 200 and shades[50:].max() < 50  # what was left is above


async def test_mp4_without_pyav_is_refused_with_what_to_send(
    folder: Path, make_preprocess: PreprocessMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "av.py").write_text("raise ImportError('hidden by the test')\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # workers look there as well
    async with make_preprocess(folder) as service:
        with pytest.raises(InvalidRequest, match="animated GIF, WebP or PNG") as caught:
            await ask(service, video_file(MP4))
        assert caught.value.reason == "VIDEO_FORMAT"
