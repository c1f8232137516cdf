"""Pictures in shared memory by MindIE-LLM's ids, over gRPC: written, read again, removed; whatever is wrong with a
block, an id or a list fails one request."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from services.preprocess.media import packed_pixels
from services.preprocess.media.fitted_picture import Square
from services.preprocess.mindie.name_lists import LIFETIME_S, NameLists
from shared.artifacts.mindie_shm import (
    BLOCKS,
    Array,
    decode_name,
    decode_shape,
    encode_name,
    encode_shape,
    is_code,
    read_block,
    release_blocks,
    write_block,
)
from shared.artifacts.store import ArtifactReader
from shared.errors import InvalidRequest, Precondition
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    GetPixelsRequest,
    PrepareRequest,
    PrepareResponse,
)
from tests.reference_models import qwen_vl, wemm
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

LIST = "request-1.txt"


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_vl.write_checkpoint(tmp_path_factory.mktemp("qwen-vl"))


@pytest.fixture(scope="module")
def wemm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wemm.write_checkpoint(tmp_path_factory.mktemp("wemm") / "m", stock=False)


@pytest.fixture
def lists(short_tmp: Path) -> Iterator[Path]:
    folder = short_tmp / "lists"
    folder.mkdir(mode=0o700)
    yield folder
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            try:
                release_blocks(path)
            except InvalidRequest:
                path.unlink()


@pytest_asyncio.fixture
async def service(
    qwen_folder: Path, lists: Path, make_preprocess: PreprocessMaker
) -> AsyncIterator[RunningPreprocess]:
    async with make_preprocess(qwen_folder, mindie_shm=lists) as running:
        yield running


def coded_ids(response: PrepareResponse) -> list[int]:
    ids: list[int] = np.frombuffer(response.mindie_ids, "<i8").tolist()
    return ids


async def written(service: RunningPreprocess, pictures: int = 1, name: str = LIST) -> list[int]:
    """The ids of a conversation with pictures."""
    parts = [image(file_of(picture(seed=number))) for number in range(pictures)]
    chat = Conversation(messages=[turn("user", *parts, text("What?"))])
    return coded_ids(
        await service.prepare(PrepareRequest(conversation=chat, shm_name_save_path=name))
    )


async def read(service: RunningPreprocess, ids: list[int], name: str = "") -> PrepareResponse:
    data = np.array(ids, "<i8").tobytes()
    return await service.prepare(PrepareRequest(mindie_ids=data, shm_name_save_path=name))


async def refused(
    service: RunningPreprocess, ids: list[int], reason: str, words: str, name: str = ""
) -> InvalidRequest:
    """The request fails, and the next one does not."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        await read(service, ids, name)
    assert caught.value.reason == reason
    await service.prepare(PrepareRequest(text="hi"))
    return caught.value


async def pixels_of(item: MediaItem) -> Array:
    reader = ArtifactReader()
    found = np.array(await reader.open(item.pixels))
    found = found.reshape(found.shape[-3:])
    await reader.close()
    if found.dtype == np.uint8:
        table = (np.arange(256) * item.scaling.factor).astype(np.float32)[None]
        mean = np.array(item.scaling.mean, np.float32)[:, None]
        std = np.array(item.scaling.std, np.float32)[:, None]
        table = (table - mean) / std
        found = np.stack([table[channel][values] for channel, values in enumerate(found)])
    return found


@pytest.mark.parametrize("model", ["qwen_vl", pytest.param("wemm", marks=pytest.mark.full)])
async def test_what_is_written_is_read_as_the_same_prompt(
    model: str,
    qwen_folder: Path,
    wemm_folder: Path,
    lists: Path,
    make_preprocess: PreprocessMaker,
) -> None:
    """Two codes for a picture of Qwen-VL, four for one of WeMM."""
    folder, codes = (qwen_folder, 2) if model == "qwen_vl" else (wemm_folder, 4)
    chat = [turn("user", image(file_of(picture(300, 180))), text("What is red?"))]
    async with make_preprocess(folder, mindie_shm=lists) as service:
        plain = await service.chat(*chat)
        assert not plain.mindie_ids
        shared = await service.prepare(
            PrepareRequest(conversation=Conversation(messages=chat), shm_name_save_path=LIST)
        )
        assert shared.token_ids == plain.token_ids
        ids, (item,) = coded_ids(shared), plain.media
        assert len(ids) == len(ids_of(plain))
        where = np.flatnonzero(is_code(np.array(ids))).tolist()
        assert where == list(range(item.offset + 1, item.offset + 1 + codes))
        begin, end = (-300, -400) if model == "wemm" else (ids_of(plain)[item.offset],) * 2
        assert ids[item.offset] == begin
        if model == "wemm":
            assert ids[item.offset + item.length - 1] == end
        names = (lists / LIST).read_text().split()
        assert names == [decode_name(ids[place]) for place in where[::2]]
        values = read_block(ids[where[0]], ids[where[1]], np.float32)
        assert values.ndim == 4 and values.shape[:2] == (1, 3)
        if model == "wemm":
            assert decode_shape(ids[where[3]]) == (1, values.shape[2] // 14, values.shape[3] // 14)
            assert read_block(ids[where[2]], ids[where[3]], np.bool_).all()

        again = await read(service, ids, LIST)
        assert ids_of(again) == ids_of(plain)
        (found,) = again.media
        for field in ("offset", "length", "rows", "embed_runs"):
            assert getattr(found, field) == getattr(item, field)
        assert found.digest != item.digest
        expected, made = await pixels_of(item), await pixels_of(found)
        assert np.array_equal(made[:, : expected.shape[1], : expected.shape[2]], expected)
        assert not made[:, expected.shape[1] :].any() and not made[:, :, expected.shape[2] :].any()
        # The list's blocks are gone, and nothing needs them: here, and in another process.
        assert not (lists / LIST).exists() and not any((BLOCKS / name).exists() for name in names)
    async with make_preprocess(folder, name="other") as other:
        await other.stub.GetPixels(GetPixelsRequest(media=found))
        with pytest.raises(InvalidRequest, match="not taken here"):
            await read(other, ids)
        with pytest.raises(InvalidRequest, match="not taken here"):
            await written(other)


async def test_blocks_of_mindie_itself(service: RunningPreprocess, lists: Path) -> None:
    """Written by another program under any length of name, with a shape of three or four dimensions; without a list
    they stay."""
    ids = await written(service, pictures=2)
    first, second = (int(place) for place in np.flatnonzero(is_code(np.array(ids)))[::2])
    assert len((lists / LIST).read_text().split()) == 2
    values = read_block(ids[first], ids[first + 1], np.float32)[0]
    name = f"psm_{os.getpid():x}"[:14]
    (BLOCKS / name).write_bytes(values.tobytes() + bytes(4096))  # blocks are whole pages elsewhere
    try:
        ids[second : second + 2] = encode_name(name), encode_shape(values.shape)
        for _ in range(2):
            one, two = (await read(service, ids)).media
            assert one.digest == two.digest
        assert (BLOCKS / name).exists()
    finally:
        (BLOCKS / name).unlink()


async def test_ids_that_are_no_prompt(service: RunningPreprocess) -> None:
    ids = await written(service)
    at = int(np.flatnonzero(is_code(np.array(ids)))[0])
    start, row = ids[at - 1], ids[at + 2]
    value, shape = ids[at], ids[at + 1]
    bad = "BAD_SHARED_MEMORY_ID"
    error = await refused(service, [1, value, shape], bad, "stands without")
    assert error.metadata["field"] == "prompt[1]"
    await refused(service, [1, start, value], bad, "2 codes")
    await refused(service, [start, value, 5, *ids[at + 2 :]], bad, "2 codes")
    await refused(service, [start, value - 1, shape, *ids[at + 2 :]], bad, "no code of a block")
    await refused(service, [start, value, shape - 1, *ids[at + 2 :]], bad, "no code of a shape")
    await refused(service, [start, value, -(1 << 63), *ids[at + 2 :]], bad, "no code of a shape")
    await refused(service, [*ids[: at + 2], *ids[at + 3 :]], "IMAGE_UNUSABLE", "256 tokens")
    await refused(service, [*ids[: at + 2], row, *ids[at + 2 :]], "IMAGE_UNUSABLE", "258 tokens")
    await refused(service, [-2, *ids], "BAD_TOKEN_ID", "-2 is outside")
    await refused(service, [1 << 40, *ids], "BAD_TOKEN_ID", "outside the vocabulary")
    await refused(service, [start, *ids], bad, "no ids of its tensors follow")
    await refused(service, ids * 40, "CONTEXT_LENGTH_EXCEEDED", "maximum context length")
    other = encode_shape((1, 3, 4, 4))
    await refused(service, [*ids[: at + 1], other, *ids[at + 2 :]], "IMAGE_UNUSABLE", "of shape")
    with pytest.raises(InvalidRequest, match="no whole token ids"):
        await service.prepare(PrepareRequest(mindie_ids=b"1234567"))
    data = np.array(ids, "<i8").tobytes()
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        await service.prepare(PrepareRequest(mindie_ids=data, keep_last_tokens=5))
    assert (await read(service, ids)).media


async def test_blocks_that_are_no_picture(service: RunningPreprocess, short_tmp: Path) -> None:
    ids = await written(service)
    at = int(np.flatnonzero(is_code(np.array(ids)))[0])
    block = BLOCKS / decode_name(ids[at])
    good = block.read_bytes()

    block.write_bytes(good[:-1])  # torn
    await refused(service, ids, "BAD_SHARED_MEMORY_ID", "bytes; ")
    block.write_bytes(b"")
    await refused(service, ids, "BAD_SHARED_MEMORY_ID", "has 0 bytes")
    block.write_bytes(np.full(len(good) // 4, np.nan, np.float32).tobytes())
    await refused(service, ids, "IMAGE_UNUSABLE", "finite")
    block.unlink()
    error = await refused(service, ids, "NO_SHARED_MEMORY", block.name)
    assert error.metadata["field"] == f"prompt[{at - 1}]"
    os.mkfifo(block)  # would be waited for
    await refused(service, ids, "NO_SHARED_MEMORY", block.name)
    block.unlink()
    (short_tmp / "elsewhere").write_bytes(good)
    block.symlink_to(short_tmp / "elsewhere")
    await refused(service, ids, "NO_SHARED_MEMORY", block.name)
    block.unlink()
    block.write_bytes(good)
    assert (await read(service, ids, LIST)).media


async def test_lists_are_files_of_one_folder(
    service: RunningPreprocess, lists: Path, short_tmp: Path
) -> None:
    outside = short_tmp / "outside.txt"
    for name in ("../outside.txt", str(outside), "a/b", ".", "..", "/", "x" * 200, "a\nb", ".a"):
        with pytest.raises(InvalidRequest, match="must name a file") as caught:
            await written(service, name=name)
        assert caught.value.metadata["field"] == "shm_name_save_path"
    (lists / "link").symlink_to(outside)
    before = set(BLOCKS.glob("psm_*"))
    with pytest.raises(InvalidRequest, match="link"):
        await written(service, name="link")
    assert not outside.exists() and set(BLOCKS.glob("psm_*")) <= before
    ids = await written(service, name=str(lists / LIST))  # as MindIE-LLM's callers write it
    for content, reason, words in (
        (b"psm_12345678\n../../etc/passwd\n", "BAD_SHARED_MEMORY_ID", "no name of a block"),
        (b"\xff\xff", "BAD_SHARED_MEMORY_LIST", "no list"),
        (b"psm_1\n" * 20_000, "BAD_SHARED_MEMORY_LIST", "more than"),
    ):
        (lists / "torn").write_bytes((lists / LIST).read_bytes() + content)
        await refused(service, ids, reason, words, name="torn")
        assert (lists / "torn").exists()
    (lists / "link").unlink()
    outside.write_bytes((lists / LIST).read_bytes())
    (lists / "link").symlink_to(outside)
    await refused(service, ids, "BAD_SHARED_MEMORY_LIST", "link", name="link")
    assert (await read(service, ids, "never-written")).media
    assert (await read(service, ids, LIST)).media
    await refused(service, ids, "NO_SHARED_MEMORY", "psm_", name=LIST)


async def test_blocks_that_nobody_releases_go_with_their_list(lists: Path) -> None:
    old, new, other = lists / "old", lists / "new", lists / "no-list"
    values = np.zeros(4, np.float32)
    lost, kept = write_block(values, old), write_block(values, new)
    other.write_text("not a name\n")
    for path in (old, other):
        os.utime(path, (path.stat().st_mtime - LIFETIME_S - 1,) * 2)
    assert NameLists(lists).release_old() == 1
    assert not (BLOCKS / lost).exists() and not old.exists()
    assert (BLOCKS / kept).exists() and new.exists() and other.exists()


async def test_wemm_masks(wemm_folder: Path, lists: Path, make_preprocess: PreprocessMaker) -> None:
    """A mask cuts padding off; one that is no rectangle, or of other sizes than the ids say, is refused."""
    async with make_preprocess(wemm_folder, mindie_shm=lists) as service:
        ids = await written(service)
        at = int(np.flatnonzero(is_code(np.array(ids)))[0])
        values = read_block(ids[at], ids[at + 1], np.float32)
        mask = read_block(ids[at + 2], ids[at + 3], np.bool_)
        _, rows, columns = mask.shape
        (plain,) = (await read(service, ids)).media

        def with_tensors(values: Array, mask: Array) -> list[int]:
            codes = []
            for tensor in (values, mask):
                codes += [
                    encode_name(write_block(tensor, lists / LIST)),
                    encode_shape(tensor.shape),
                ]
            return [*ids[:at], *codes, *ids[at + 4 :]]

        padded = np.pad(values, ((0, 0), (0, 0), (0, 14), (0, 0)))
        below = np.pad(mask, ((0, 0), (0, 1), (0, 0)))
        if rows < columns:  # there is room for one more
            (same,) = (await read(service, with_tensors(padded, below))).media
            assert same.digest == plain.digest
        hole = mask.copy()
        hole[0, 1, 1] = False
        for wrong_mask in (hole, np.zeros_like(mask)):
            await refused(service, with_tensors(values, wrong_mask), "IMAGE_UNUSABLE", "rectangle")
        less = with_tensors(values[:, :, : 14 * 4, : 14 * 4], mask[:, :4, :4])
        await refused(service, less, "IMAGE_UNUSABLE", "which has 3")
        await refused(service, with_tensors(values, mask[:, 1:]), "IMAGE_UNUSABLE", "with a mask")
        await refused(service, ids[: at + 4] + ids[at + 5 :], "IMAGE_UNUSABLE", "patches")
        end = ids.index(-400)
        error = await refused(service, ids[:end], "BAD_SHARED_MEMORY_ID", "does not end with -400")
        assert error.metadata["field"] == f"prompt[{at - 1}]"


async def test_models_without_such_ids_do_not_start(
    clip_folder: Path, lists: Path, make_preprocess: PreprocessMaker
) -> None:
    with pytest.raises(InvalidRequest, match="Qwen-VL and WeMM alone"):
        async with make_preprocess(clip_folder, mindie_shm=lists):
            pass
    (lists / "file").write_text("")
    with pytest.raises(Precondition, match="--mindie-shm"):
        NameLists(lists / "file")


@pytest.mark.asyncio(loop_scope="module")
async def test_our_own_forms_of_pictures_are_no_files_of_clients(
    clip_service: RunningPreprocess,
) -> None:
    """Pixel values that nobody has checked, and a square of any size."""
    values = packed_pixels.pack(np.zeros((3, 32, 32), np.float32), 1)
    square = Square(1 << 31, (0, 0, 0)).pack(file_of(picture()))
    for data in (values, square):
        with pytest.raises(InvalidRequest, match="not an image file") as caught:
            await clip_service.chat(turn("user", image(data), text("hi")))
        assert caught.value.reason == "IMAGE_FORMAT"
