"""What a family's prompt rule may say, and what becomes of it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.families.llava.prompt import LlavaRule
from services.preprocess.prompt.prompt_rule import After, Mode, Place, PromptRule, Update
from services.preprocess.prompt.tokenizer import Ids
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality
from tests.support.preprocess_service import PreprocessMaker, file_of, image, picture, text, turn

IMAGE = Modality.MODALITY_IMAGE
PICTURE = file_of(picture(64, 48))
FIELD = "messages[0].content[0].image_url"


async def test_more_items_than_the_model_takes_are_refused(
    clip_folder: Path, make_preprocess: PreprocessMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlavaRule, "limits", {IMAGE: 1})
    async with make_preprocess(clip_folder) as service:
        await service.chat(turn("user", image(PICTURE, FIELD), text("one")))
        with pytest.raises(InvalidRequest, match=r"2 images, .* takes 1"):
            await service.chat(turn("user", image(PICTURE, FIELD), image(PICTURE, FIELD)))


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
        Update(IMAGE, (3, 4)),
        Update(IMAGE, Place.START, Mode.INSERT),
        Update(IMAGE, After((3,)), Mode.INSERT),
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
