"""Images of every kind, good and hostile: a bad one fails its request and nothing else."""

import asyncio
import io
import os
import signal
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import redis.asyncio
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from shared.errors import InvalidRequest, NotFound, Overloaded, Precondition, ServingError
from shared.net.rpc.errors import calling
from shared.queue.stores.media_store import media_digest
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1.preprocess_pb2 import GetPixelsRequest
from tests.support.preprocess.forked_workers import worker_pids
from tests.support.preprocess.pixels import pixel_values
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    image,
    image_at,
    picture,
    text,
    turn,
)

FIELD = "messages[3].content[1].image_url"


def expected(image: PIL.Image.Image) -> np.ndarray[Any, Any]:
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    pixels: np.ndarray[Any, Any] = processor(images=image, return_tensors="np")["pixel_values"][0]
    return pixels


def kinds() -> dict[str, tuple[bytes, PIL.Image.Image]]:
    """Files, and the picture that each must be seen as."""
    base = picture(64, 48, 5)
    files: dict[str, tuple[bytes, PIL.Image.Image]] = {}
    for style in ("PNG", "BMP", "TIFF"):
        files[style] = (file_of(base, style), base)
    for style in ("JPEG", "WEBP"):
        data = file_of(base, style)
        files[style] = (data, PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    files["grey"] = (file_of(base.convert("L")), base.convert("L").convert("RGB"))
    files["bilevel"] = (file_of(base.convert("1")), base.convert("1").convert("RGB"))
    palette = base.convert("P")
    files["palette"] = (file_of(palette), palette.convert("RGB"))
    cmyk = file_of(base.convert("CMYK"), "JPEG")
    files["CMYK JPEG"] = (cmyk, PIL.Image.open(io.BytesIO(cmyk)).convert("RGB"))

    values = np.asarray(base.convert("L")).astype(np.uint16)
    deep = PIL.Image.fromarray(values * 256 + 7)
    files["16-bit PNG"] = (file_of(deep), base.convert("L").convert("RGB"))

    frames = [picture(64, 48, seed).convert("P") for seed in range(3)]
    animated = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    files["animated GIF"] = (animated, PIL.Image.open(io.BytesIO(animated)).convert("RGB"))

    alpha = base.convert("RGBA")
    alpha.putalpha(PIL.Image.fromarray(np.where(values > 100, 255, 0).astype(np.uint8)))
    seen = PIL.Image.new("RGB", base.size, "white")
    seen.paste(base, mask=alpha.getchannel("A"))
    files["transparent PNG"] = (file_of(alpha), seen)

    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn right
    files["EXIF rotated"] = (
        file_of(base, exif=exif),
        base.transpose(PIL.Image.Transpose.ROTATE_270),
    )
    return files


@pytest.mark.asyncio(loop_scope="module")
async def test_every_format_gives_the_pixels_of_transformers(
    clip_service: RunningPreprocess,
) -> None:
    for kind, (data, seen) in kinds().items():
        response = await clip_service.chat(turn("user", image(data), text("hi")))
        np.testing.assert_array_equal(await pixel_values(response.media[0]), expected(seen), kind)
        assert response.times.media_us > 0


def png_that_says(width: int, height: int) -> bytes:
    """A PNG whose header promises more than there is."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    bomb = zlib.compress(b"\0" * 1_000_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", bomb) + chunk(b"IEND", b"")


BAD = {
    "truncated": ("IMAGE_DAMAGED", file_of(picture(200, 200))[:5000]),
    "text": ("IMAGE_FORMAT", b"this is not an image"),
    "svg": ("IMAGE_FORMAT", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    "bomb": ("IMAGE_TOO_LARGE", png_that_says(20_000, 20_000)),
    "absurd header": ("IMAGE_TOO_LARGE", png_that_says(2**31 - 1, 2**31 - 1)),
    "zero": ("IMAGE_", png_that_says(0, 10)),
    "1x1": ("IMAGE_TOO_SMALL", file_of(picture(1, 1))),
    "thin": ("IMAGE_ASPECT_RATIO", file_of(picture(4, 900))),
    "float": ("IMAGE_FORMAT", file_of(PIL.Image.new("F", (20, 20)), "TIFF")),
    "bytes": ("MEDIA_TOO_LARGE", file_of(picture(400, 400))),
    "empty": ("MEDIA_URL", "data:image/png;base64,"),
    "bad base64": ("MEDIA_URL", "data:image/png;base64,@@@@"),
    "no comma": ("MEDIA_URL", "data:image/png"),
    "file url": ("LOCAL_MEDIA_OFF", "file:///etc/passwd"),
    "nothing": ("MEDIA_EMPTY", ""),
}


@pytest.mark.asyncio(loop_scope="module")
async def test_bad_images_are_refused_by_field(clip_service: RunningPreprocess) -> None:
    good = file_of(picture(80, 60), "JPEG")
    for case, (reason, source) in BAD.items():
        part = image(source, FIELD) if isinstance(source, bytes) else image_at(str(source), FIELD)
        with pytest.raises(InvalidRequest) as caught:
            await clip_service.chat(turn("user", image(good, "other"), part, text("hi")))
        assert caught.value.reason.startswith(reason), (case, caught.value)
        assert caught.value.metadata["field"] == FIELD
        assert caught.value.message.startswith(FIELD)
        await clip_service.chat(turn("user", image(good)))


@pytest.mark.asyncio(loop_scope="module")
async def test_data_urls(clip_service: RunningPreprocess) -> None:
    import base64
    from urllib.parse import quote

    data = file_of(picture(40, 40))
    plain = base64.b64encode(data).decode()
    urls = [
        f"data:image/png;base64,{plain}",
        f"DATA:;base64,{plain[:50]}\n{plain[50:]}",
        f"data:image/png,{quote(data)}",
    ]
    for url in urls:
        response = await clip_service.chat(turn("user", image_at(url)))
        assert response.media[0].source_digest == media_digest(data)


@pytest.mark.asyncio(loop_scope="module")
async def test_repeated_images_are_processed_once(clip_service: RunningPreprocess) -> None:
    a, b = (file_of(picture(300, 300, seed)) for seed in (1, 2))
    together = await asyncio.gather(
        *(clip_service.chat(turn("user", image(a), image(b), image(a))) for _ in range(4))
    )
    again = await clip_service.chat(turn("user", image(b), image(a)))
    first = [m.pixels.location.path for m in together[0].media]
    assert first[0] == first[2] != first[1]
    for response in together:
        assert [m.pixels.location.path for m in response.media] == first
    assert [m.pixels.location.path for m in again.media] == [first[1], first[0]]
    offsets = [m.offset for m in together[0].media]
    assert offsets == sorted(offsets)
    assert len(set(offsets)) == 3


async def test_pixels_are_made_again_after_a_restart(
    clip_folder: Path, siglip_folder: Path, make_preprocess: PreprocessMaker, redis_url: str
) -> None:
    data, more = file_of(picture(90, 70)), file_of(picture(70, 90))
    async with make_preprocess(clip_folder, "first") as service:
        item, other = (await service.chat(turn("user", image(data), image(more)))).media
        before = await pixel_values(item)
    assert not Path(item.pixels.location.path).exists()
    async with make_preprocess(clip_folder, "second") as service:
        answer = await service.stub.GetPixels(GetPixelsRequest(media=item))
        again = MediaItem(digest=item.digest, pixels=answer.pixels, scaling=item.scaling)
        np.testing.assert_array_equal(await pixel_values(again), before)
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.flushall()
        with pytest.raises(Precondition), calling("preprocess"):
            await service.stub.GetPixels(GetPixelsRequest(media=MediaItem(digest=b"x" * 16)))
        with pytest.raises(NotFound), calling("preprocess"):
            await service.stub.GetPixels(GetPixelsRequest(media=other))
    async with make_preprocess(siglip_folder, "other model") as service:
        with pytest.raises(Precondition), calling("preprocess"):
            await service.stub.GetPixels(GetPixelsRequest(media=item))


async def test_a_small_cache_keeps_answering(
    clip_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(clip_folder, pixel_cache_bytes=2 * 3 * 56 * 56) as service:
        items = [
            (await service.chat(turn("user", image(file_of(picture(60, 60, seed)))))).media[0]
            for seed in range(4)
        ]
        there = [Path(item.pixels.location.path).exists() for item in items]
        assert there == [False, False, True, True]
        answer = await service.stub.GetPixels(GetPixelsRequest(media=items[0]))
        assert Path(answer.pixels.location.path).exists()


async def test_a_full_media_store_asks_to_retry(
    clip_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    one, two = (file_of(picture(60, 60, seed)) for seed in (1, 2))
    async with make_preprocess(clip_folder, media_store_bytes=len(one) + 100) as service:
        await service.chat(turn("user", image(one)))
        with pytest.raises(Overloaded) as caught:
            await service.chat(turn("user", image(two)))
        assert caught.value.reason == "MEDIA_STORE_FULL"
        assert int(caught.value.metadata["retry_after_s"]) > 0
        await service.chat(turn("user", image(one)))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_worker_costs_no_request(clip_service: RunningPreprocess) -> None:
    await clip_service.chat(turn("user", image(file_of(picture(50, 50, 1)))))
    for pid in worker_pids():
        os.kill(pid, signal.SIGKILL)
    responses = await asyncio.gather(
        *(
            clip_service.chat(turn("user", image(file_of(picture(50, 50, seed)))))
            for seed in range(3)
        )
    )
    assert all(len(response.media) == 1 for response in responses)


async def test_a_worker_that_hangs_costs_one_request(
    clip_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    others = set(worker_pids())
    async with make_preprocess(clip_folder, image_timeout_s=1.0) as service:
        stopped = set(worker_pids()) - others
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        response = await service.chat(turn("user", image(file_of(picture(50, 50)))))
        assert len(response.media) == 1
        assert not stopped & set(worker_pids())


async def test_without_redis_text_is_prepared_and_images_are_not(
    clip_folder: Path, make_preprocess: PreprocessMaker, private_redis: Any, short_tmp: Path
) -> None:
    async with make_preprocess(clip_folder, redis_url=private_redis.url) as service:
        private_redis.stop()
        await service.chat(turn("user", text("hi")))
        with pytest.raises(ServingError) as caught:
            await service.chat(turn("user", image(file_of(picture()))))
        assert caught.value.reason == "REDIS_UNAVAILABLE"
