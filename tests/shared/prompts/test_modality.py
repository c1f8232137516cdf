"""The modality of an item is what its field says."""

import pytest

from services.families import registry
from services.families.family import Family
from shared.errors import InvalidRequest
from shared.prompts.modality import IMAGE, NAMES, VIDEO, modality_of, require_taken
from tessera.common.v1.media_pb2 import MediaItem, Modality


def test_an_item_without_the_field_is_an_image() -> None:
    assert modality_of(MediaItem()) == IMAGE
    assert modality_of(MediaItem(modality=VIDEO, grid_t=1)) == VIDEO


@pytest.mark.parametrize("number", [9, Modality.MODALITY_AUDIO])
def test_a_modality_that_is_not_served_is_named(number: Modality.ValueType) -> None:
    with pytest.raises(InvalidRequest, match=rf"modality {number} .* image \(1\) and video \(2\)"):
        modality_of(MediaItem(modality=number))


def test_every_family_says_which_of_the_modalities_it_takes() -> None:
    for family in registry.in_tree():
        assert set(family.modalities) <= NAMES.keys()
        assert bool(family.modalities) == family.takes_media


def test_a_model_refuses_what_it_does_not_take() -> None:
    family = Family((), encoder="somewhere:Encoder")
    require_taken(IMAGE, family.modalities, "some model", "media")
    with pytest.raises(InvalidRequest, match="some model takes no videos") as caught:
        require_taken(VIDEO, family.modalities, "some model", "media")
    assert caught.value.reason == "NO_VIDEO_MODEL"
