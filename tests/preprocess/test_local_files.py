"""Files of this machine are media below one permitted folder alone, however a path is written."""

import os
from pathlib import Path

import pytest

from services.preprocess.items.local_files import LocalFiles
from shared.errors import InvalidRequest, Precondition
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    image_at,
    picture,
    turn,
)

MOST = 10_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A permitted folder beside one that is not."""
    permitted, other = tmp_path / "permitted", tmp_path / "permitted other"
    (permitted / "below").mkdir(parents=True)
    other.mkdir()
    (permitted / "below" / "a b.png").write_bytes(b"picture")
    (permitted / "large.png").write_bytes(bytes(MOST + 1))
    (other / "secret.png").write_bytes(b"secret")
    (permitted / "inside.png").symlink_to(permitted / "below" / "a b.png")
    (permitted / "outside.png").symlink_to(other / "secret.png")
    (permitted / "out").symlink_to(other)
    os.mkfifo(permitted / "pipe.png")
    return permitted


def read(folder: Path, path: str, prefix: str = "file://") -> bytes:
    return LocalFiles(folder).read(f"{prefix}{path}", MOST)


def test_files_below_the_folder_are_read(folder: Path) -> None:
    for path in (
        "below/a%20b.png",
        "below/../below/a b.png",
        "inside.png",
        "out/../permitted/inside.png",
    ):
        assert read(folder, f"{folder}/{path}") == b"picture"
    assert read(folder, f"{folder}/inside.png", "FILE://localhost") == b"picture"
    assert read(folder, f"{folder}/inside.png", "file:") == b"picture"


@pytest.mark.parametrize(
    "path",
    [
        "../permitted other/secret.png", "%2e%2e/permitted%20other/secret.png", "outside.png", "out/secret.png",
        "nothing.png", "below", "pipe.png", "",
    ],
)  # fmt: skip
def test_what_lies_elsewhere_is_not_read_and_not_told_apart(folder: Path, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(folder, f"{folder}/{path}")
    assert caught.value.reason == "LOCAL_MEDIA"
    assert caught.value.message.startswith("there is no file that can be read below the folder")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:relative.png", "MEDIA_URL"),
        ("file://other.host/a.png", "MEDIA_URL"),
        ("file:///a%00.png", "MEDIA_URL"),
        ("file:///etc/passwd", "LOCAL_MEDIA"),
        ("file:///dev/zero", "LOCAL_MEDIA"),
    ],
)
def test_urls_of_no_such_file_are_refused(folder: Path, url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LocalFiles(folder).read(url, MOST)
    assert caught.value.reason == reason


def test_a_file_has_a_limit_and_a_folder_must_be_one(folder: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(folder, f"{folder}/large.png")
    assert caught.value.reason == "MEDIA_TOO_LARGE"
    for path in (folder / "inside.png", folder / "nothing"):
        with pytest.raises(Precondition):
            LocalFiles(path)


async def test_a_picture_by_its_path(
    clip_folder: Path, make_preprocess: PreprocessMaker, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(file_of(picture(60, 60)))
    named = turn("user", image_at(f"file://{tmp_path}/a.png"))
    async with make_preprocess(clip_folder, allowed_local_media_path=tmp_path) as service:
        assert len((await service.chat(named)).media) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_paths_are_refused_by_default(clip_service: RunningPreprocess) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await clip_service.chat(turn("user", image_at("file:///a.png")))
    assert caught.value.reason == "LOCAL_MEDIA_OFF"
    assert "--allowed-local-media-path" in caught.value.message
