"""What a family's prompt rule may say, and what becomes of it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.families.llava.prompt import LlavaRule
from services.preprocess.limit_setting import parse_limits
from services.preprocess.prompt.prompt_rule import After, Mode, Place, PromptRule, Update
from services.preprocess.prompt.tokenizer import Ids
from services.preprocess.settings import PreprocessSettings
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality
from tests.support.preprocess.service import PreprocessMaker, file_of, image, picture, text, turn

IMAGE = Modality.MODALITY_IMAGE
PICTURE = file_of(picture(64, 48))
FIELD = "messages[0].content[0].image_url"


@pytest.mark.parametrize(
    "setting",
    ["image=16,video=1", pytest.param("image=1,video=16", marks=pytest.mark.full), "0"],
)
async def test_the_smaller_limit_of_model_and_setting_holds(
    clip_folder: Path,
    make_preprocess: PreprocessMaker,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
) -> None:
    monkeypatch.setattr(LlavaRule, "limits", {IMAGE: 2})
    most = {"image=16,video=1": 2, "image=1,video=16": 1, "0": 0}[setting]
    said = ("no images", "at most 1 image ", "at most 2 images ")[most]
    async with make_preprocess(clip_folder, limit_mm_per_prompt=setting) as service:
        await service.chat(turn("user", *[image(PICTURE, FIELD)] * most, text("some")))
        with pytest.raises(InvalidRequest, match=f"may have {said}") as caught:
            await service.chat(turn("user", *[image(PICTURE, FIELD)] * (most + 1)))
    assert caught.value.reason == "TOO_MANY_IMAGES"
    assert ("all that" in caught.value.message) == (most == 2)


@pytest.mark.parametrize(
    ("setting", "images", "videos"),
    [
        ("video=1", 16, 1),
        ("image=2", 2, 16),
        ("3", 3, 3),
        (" image = 2 , video = 0 ", 2, 0),
        ('{"image": 2, "video": 5}', 2, 5),
        ("{}", 16, 16),
    ],
)
def test_limits_as_flags_write_them(setting: str, images: int, videos: int) -> None:
    assert parse_limits(setting) == {"image": images, "video": videos}


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("audio=1", "'audio'"),
        ("image=1,vidoe=1", "'vidoe'"),
        ('{"audio": 1}', "'audio'"),
        ("image=-1", "image: '-1'"),
        ("image=", "image: ''"),
        ("", "image: ''"),
        ("video=1.5", "video: '1.5'"),
        ('{"video": {"count": 1}}', "video: {'count': 1}"),
        ('{"video": true}', "video: True"),
        ("{", "limit-mm-per-prompt"),
    ],
)
def test_other_limits_are_refused_by_name(
    setting: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        PreprocessSettings.load(["--model", "m", "--limit-mm-per-prompt", setting])
    assert named in capsys.readouterr().err


async def test_changes_that_no_item_causes_come_before_the_spans(
    clip_folder: Path, make_preprocess: PreprocessMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = turn("user", image(PICTURE, FIELD), text("what?"))
    async with make_preprocess(clip_folder) as service:
        plain = await service.chat(message)

    def finish(rule: PromptRule, ids: Ids) -> Ids:
        return np.concatenate([np.array([7, 8], np.int32), ids])

    monkeypatch.setattr(LlavaRule, "finish", finish)
    async with make_preprocess(clip_folder, "q") as service:
        changed = await service.chat(message)
    assert changed.token_ids == np.array([7, 8], "<i4").tobytes() + plain.token_ids
    assert changed.media[0].offset == plain.media[0].offset + 2


@pytest.mark.parametrize(
    "update",
    [
        Update(IMAGE, (3,), Mode.INSERT),
        pytest.param(Update(IMAGE, (3, 4)), marks=pytest.mark.full),
        pytest.param(Update(IMAGE, Place.START), marks=pytest.mark.full),
        pytest.param(Update(IMAGE, After((3,)), Mode.INSERT), marks=pytest.mark.full),
    ],
)
async def test_updates_that_are_not_served_are_refused_at_start(
    clip_folder: Path,
    make_preprocess: PreprocessMaker,
    update: Update,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def updates(rule: PromptRule) -> Sequence[Update]:
        return (update,)

    monkeypatch.setattr(LlavaRule, "updates", updates)
    with pytest.raises(InvalidRequest, match="the place of one token"):
        async with make_preprocess(clip_folder):
            pass
