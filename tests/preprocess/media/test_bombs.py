"""Small files that cost much to decode: refused by their headers, or ended by a limit."""

import asyncio
import contextlib
import io
import os
import re
import signal
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import pytest_asyncio
import structlog

from services.preprocess.media import frames
from services.preprocess.media.frame_selection import FrameSelection
from services.preprocess.media.image_decoder import decode
from services.preprocess.media.image_limits import ImageLimits, UnreadableImage
from services.preprocess.media.video import open_video
from services.preprocess.worker.pool import ImageWorkerPool
from shared.artifacts.store import ArtifactStore, Reservation
from shared.errors import InvalidRequest, Overloaded
from shared.prompts.modality import IMAGE, VIDEO
from tests.support.preprocess.service import file_of, picture

LIMITS = ImageLimits(max_pixels=50_000_000, max_video_pixels=400_000_000)


def chunk(kind: bytes, body: bytes) -> bytes:
    end = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + end


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A grey PNG of zeros with more chunks behind its header."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes((width + 1) * height), 9))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + rows + chunk(b"IEND", b"")


def scans(width: int, height: int, more: int, size: int = 100) -> bytes:
    """A progressive JPEG whose last scan is told so many times more."""
    whole = file_of(PIL.Image.new("L", (width, height), size), "JPEG", progressive=True)
    last = [found.start() for found in re.finditer(b"\xff\xda", whole)][-1]
    return whole[:-2] + whole[last:-2] * more + b"\xff\xd9"


def moving_png(width: int, height: int, frames: int) -> bytes:
    """An animated PNG of frames that take some bytes each."""
    data = zlib.compress(bytes((width + 1) * height), 9)
    parts = [chunk(b"acTL", struct.pack(">II", frames, 0))]
    number = 0
    for _ in range(frames):
        control = struct.pack(">IIIIIHHBB", number, width, height, 0, 0, 1, 10, 0, 0)
        parts += [chunk(b"fcTL", control), chunk(b"fdAT", struct.pack(">I", number + 1) + data)]
        number += 2
    return png(width, height, *parts)


def moving_gif(width: int, height: int, frames: int) -> bytes:
    """An animated GIF of two colours, whose second frame is told again and again."""
    first, second = (PIL.Image.new("L", (width, height), colour) for colour in (0, 90))
    two = file_of(first, "GIF", save_all=True, append_images=[second])
    last = two.rindex(b"\x21\xf9\x04")
    return two[:-1] + two[last:-1] * (frames - 2) + b"\x3b"


def moving_webp(width: int, height: int, frames: int) -> bytes:
    """An animated WebP of two colours, whose second frame is told again and again."""
    first, second = (PIL.Image.new("RGB", (width, height), colour) for colour in (0, 90))
    two = file_of(first, "WEBP", save_all=True, append_images=[second], quality=0, method=0)
    whole = two + two[two.rindex(b"ANMF") :] * (frames - 2)
    return whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:]


def webp(width: int, height: int) -> bytes:
    return file_of(PIL.Image.new("RGB", (width, height)), "WEBP", lossless=True, method=0)


PROFILE = chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(1_000_000), 9))

PICTURES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "scans": ("scans", lambda: scans(4000, 4000, 400)),
    "scans of a large picture": ("scans", lambda: scans(7000, 7000, 30)),
    "segments": ("segments", lambda: b"\xff\xd8" + b"\xff\xfe\x00\x02" * 70_000 + b"\xff\xd9"),
    "WebP": ("--image-memory-bytes", lambda: webp(7000, 7000)),
    "profiles": ("profiles", lambda: png(100, 100, PROFILE * 100)),
    "chunks": ("chunks", lambda: png(100, 100, chunk(b"abCd", b"") * 70_000)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_over_a_limit_are_refused_by_their_header(name: str) -> None:
    limit, make = PICTURES[name]
    with pytest.raises(UnreadableImage) as caught:
        decode(make(), LIMITS)
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert limit in caught.value.message


ANIMATIONS: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: moving_png(2000, 2000, 150),
    "GIF": lambda: moving_gif(3000, 3000, 61),
    "WebP": lambda: moving_webp(3500, 3500, 36),
    "frames without pixels": lambda: moving_png(4, 4, 11_000),
}


@pytest.mark.parametrize("name", ANIMATIONS)
def test_animations_over_a_limit_are_refused_by_their_header(name: str) -> None:
    with pytest.raises(UnreadableImage) as caught:
        open_video(ANIMATIONS[name](), FrameSelection(), LIMITS)
    assert caught.value.reason == "VIDEO_TOO_LARGE"
    assert "frames" in caught.value.message


def test_files_of_common_encoders_pass() -> None:
    large = picture(60, 40).resize((4000, 3000))
    for style, options in (
        ("JPEG", {"progressive": True}),
        ("JPEG", {"progressive": True, "exif": thumbnail()}),
        ("WEBP", {"method": 0}),
        ("PNG", {"icc_profile": bytes(3000), "compress_level": 1}),
    ):
        assert decode(file_of(large, style, **options), LIMITS).size == (4000, 3000)
    four = file_of(large.convert("CMYK"), "JPEG", progressive=True)
    assert decode(four, LIMITS).size == (4000, 3000)


def thumbnail() -> bytes:
    """EXIF as cameras write it: with a JPEG inside."""
    exif = PIL.Image.Exif()
    exif[0x927C] = file_of(picture(60, 40), "JPEG", progressive=True) * 8
    return exif.tobytes()


class Pool:
    """A pool, and where its pixels go."""

    def __init__(self, pool: ImageWorkerPool, store: ArtifactStore) -> None:
        self.pool = pool
        self._store = store
        self._count = 0

    def place(self) -> Reservation:
        self._count += 1
        return self._store.reserve(self._count.to_bytes(16, "big"))

    async def decode(self, data: bytes, tenant: str = "") -> tuple[int, int]:
        modality = VIDEO if frames.is_packed(data) else IMAGE
        size = await self.pool.process(data, modality, self.place(), tenant)
        return size.width, size.height

    async def decode_signalled(self, data: bytes, *signals: signal.Signals) -> tuple[int, int]:
        """What becomes of a file whose worker gets signals while it has it."""
        (worker,) = self.pool.pids
        os.kill(worker, signal.SIGSTOP)
        task = asyncio.create_task(self.decode(data))
        await asyncio.sleep(0.1)
        for number in signals:
            os.kill(worker, number)
        return await task


@contextlib.asynccontextmanager
async def running_pool(model: Path, folder: Path, **options: float) -> AsyncIterator[Pool]:
    store = ArtifactStore(folder / "artifacts", "pool", "unix:/none")
    limits = ImageLimits(max_pixels=50_000_000)
    times: dict[str, Any] = {"timeout_s": 20.0, **options}
    async with ImageWorkerPool(model, limits, 1, **times) as pool:
        yield Pool(pool, store)
    store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pool(
    clip_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pool]:
    """A pool of the defaults for several tests; each leaves it with one idle worker."""
    async with running_pool(clip_folder, tmp_path_factory.mktemp("pool")) as pool:
        yield pool


GOOD = file_of(picture(80, 60))


def slow() -> bytes:
    """A file that takes over half a second to decode."""
    return file_of(PIL.Image.new("RGB", (7000, 7000)), "JPEG", progressive=True)


async def test_a_file_that_takes_too_long_is_tried_once_and_charged_to_its_tenant(
    clip_folder: Path, short_tmp: Path
) -> None:
    # A busy machine may give the worker so little that it counts as starved, and the file is tried again.
    times = {"timeout_s": 0.3, "budget_s": 0.01, "starved_s": 0.0}
    async with running_pool(clip_folder, short_tmp, **times) as pool:
        with structlog.testing.capture_logs() as lines, pytest.raises(InvalidRequest) as late:
            await pool.decode(slow(), "a")
        assert late.value.reason == "IMAGE_TIMEOUT"
        assert "--image-timeout-s" in late.value.message
        assert [line["again"] for line in lines if line["event"] == "image worker lost"] == [False]
        with pytest.raises(Overloaded) as caught:
            await pool.decode(GOOD, "a")
        assert caught.value.reason == "DECODE_BUDGET"
        assert "--media-budget-s" in caught.value.message
        assert int(caught.value.metadata["retry_after_s"]) > 0
        pool.pool._timeout_s = 60.0  # which nothing ordinary takes, however busy the machine is
        assert await pool.decode(GOOD, "b") == (80, 60)
        # Ordinary pictures cost no budget, however many they are.
        for _ in range(30):
            assert await pool.decode(GOOD, "c") == (80, 60)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_is_tried_again_only_if_its_worker_was_killed_from_outside(
    shared_pool: Pool,
) -> None:
    assert await shared_pool.decode_signalled(GOOD, signal.SIGKILL) == (80, 60)
    for number, reason in (
        (signal.SIGSEGV, "IMAGE_UNUSABLE"),
        (signal.SIGXCPU, "IMAGE_TIMEOUT"),
        (signal.SIGSYS, "IMAGE_UNUSABLE"),
    ):
        with structlog.testing.capture_logs() as lines, pytest.raises(InvalidRequest) as caught:
            await shared_pool.decode_signalled(GOOD, number, signal.SIGCONT)
        assert caught.value.reason == reason
        assert len([line for line in lines if line["event"] == "image worker lost"]) == 1
        assert await shared_pool.decode(GOOD) == (80, 60)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_has_limits(shared_pool: Pool) -> None:
    await shared_pool.decode(GOOD)
    (worker,) = shared_pool.pool.pids
    lines = Path(f"/proc/{worker}/limits").read_text().splitlines()
    soft = {line[:26].strip(): line[26:].split()[0] for line in lines[1:]}
    for name in ("Max address space", "Max cpu time", "Max file size"):
        assert soft[name].isdigit(), name
    highest = max(int(file.name) for file in Path(f"/proc/{worker}/fd").iterdir())
    assert int(soft["Max open files"]) <= highest + 2
    environment = Path(f"/proc/{worker}/environ").read_text()
    assert "TESSERA_" not in environment


@pytest.mark.asyncio(loop_scope="module")
async def test_one_tenant_never_has_every_worker(shared_pool: Pool) -> None:
    (held,) = shared_pool.pool.pids
    os.kill(held, signal.SIGSTOP)
    stuck = [asyncio.create_task(shared_pool.decode(GOOD, "a")) for _ in range(5)]
    await asyncio.sleep(0)
    assert await shared_pool.decode(GOOD, "b") == (80, 60)
    assert not any(task.done() for task in stuck)
    os.kill(held, signal.SIGCONT)
    assert await asyncio.gather(*stuck) == [(80, 60)] * 5


def test_memory_over_the_limit_is_reported() -> None:
    deep = io.BytesIO()
    PIL.Image.new("RGB", (4000, 4000)).save(deep, "PNG")
    with pytest.raises(UnreadableImage, match="--image-memory-bytes"):
        decode(deep.getvalue(), ImageLimits(max_pixels=50_000_000, memory_bytes=64 << 20))
