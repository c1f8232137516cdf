"""The WeMM reference: sizes and counts, position ids, the tower, the prompt, generation."""

from pathlib import Path

import pytest
import torch
from transformers import Idefics2VisionConfig
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics2.modeling_idefics2 import (
    Idefics2VisionEmbeddings,
    Idefics2VisionTransformer,
)

from tests.reference_models import wemm
from tests.reference_models.common import PLACEHOLDER, below, noise
from tests.reference_models.image_processors import wemm_images
from tests.reference_models.wemm import BEGIN, END, Wemm, write_checkpoint

RELEASED = {"shortest_edge": 756, "longest_edge": 1960}
STOCK = {"shortest_edge": 378, "longest_edge": 980}
OTHER_BUCKETS = {49, 58, 77, 86, 98, 100, 110, 122, 135}
ASK = [("user", "<image>What is in the picture?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wemm"))


@pytest.mark.parametrize(
    ("image", "size", "patches", "count"),
    [
        ((1000, 600), (1960, 1176), (84, 140), 735),
        ((640, 480), (1960, 1470), (105, 140), 945),
        ((1920, 1080), (1960, 1102), (79, 140), 700),
        ((4000, 300), (1960, 756), (54, 140), 490),
        ((336, 336), (1960, 1960), (140, 140), 1225),
    ],
)
def test_the_2k_processor_gives_the_known_sizes_and_counts(
    image: tuple[int, int], size: tuple[int, int], patches: tuple[int, int], count: int
) -> None:
    assert wemm_images.resized(*image, RELEASED, stock=False) == size
    rows, columns = wemm_images.grid(*image, RELEASED, stock=False)
    assert (rows, columns) == patches
    assert -(-rows // 4) * -(-columns // 4) == count


@pytest.mark.parametrize("image", [(1000, 600), (1001, 600), (333, 500), (100, 90), (981, 300)])
def test_stock_sizes_and_pixels_are_transformers(image: tuple[int, int]) -> None:
    picture = noise(*image)
    ours = wemm_images.pixel_values(picture, STOCK, stock=True)
    theirs = Idefics2ImageProcessorPil()(picture, return_tensors="pt")["pixel_values"][0, 0]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_position_ids_differ_from_transformers_for_known_sides_only() -> None:
    embeddings = Idefics2VisionEmbeddings(
        Idefics2VisionConfig(image_size=980, patch_size=14, hidden_size=8)
    )
    seen: list[torch.Tensor] = []
    embeddings.position_embedding.register_forward_hook(lambda _, ids, rows: seen.append(ids[0]))
    different = set()
    for count in (*range(1, 60), 69, 70, *OTHER_BUCKETS, *range(115, 141)):
        with torch.no_grad():
            embeddings(torch.zeros(1, 3, 14 * count, 14), torch.ones(1, count, 1) > 0)
        if not torch.equal(wemm.position_ids(count, 1, 70), seen[-1][0]):
            different.add(count)
    assert different == OTHER_BUCKETS


def test_two_cells_share_a_bucket_at_140() -> None:
    ids = wemm.position_ids(140, 140, 70)
    assert torch.equal(ids[:140], torch.arange(140) // 2)


def test_the_tower_is_transformers(folder: Path) -> None:
    model = Wemm(folder)
    theirs = Idefics2VisionTransformer._from_config(
        Idefics2VisionConfig(**model.config["vision_config"])
    ).eval()
    theirs.load_state_dict(below(model.tensors, "vision_tower."))
    pixels = model.pixel_values(noise(60, 40))
    with torch.no_grad():
        expected = theirs(pixels[None], torch.ones(1, *patches(pixels)) > 0)
    torch.testing.assert_close(
        model.tower(pixels), expected.last_hidden_state[0], atol=1e-4, rtol=1e-4
    )


def patches(pixels: torch.Tensor) -> tuple[int, int]:
    return pixels.shape[1] // 14, pixels.shape[2] // 14


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("size", [(40, 60), (300, 200), (500, 90)])
def test_rows_are_as_many_as_placeholders(
    tmp_path: Path, stock: bool, size: tuple[int, int]
) -> None:
    model = Wemm(write_checkpoint(tmp_path, stock=stock))
    ids = model.prompt_ids(ASK, [size])
    begin, end = ids.index(BEGIN), ids.index(END)
    assert set(ids[begin + 1 : end]) == {PLACEHOLDER}
    assert model.embed_image(noise(*size)).shape == (end - begin + 1, 64)


def test_the_prompt_has_no_newline_between_its_two_turns(folder: Path) -> None:
    model = Wemm(folder)
    ids = model.prompt_ids(ASK, [(50, 50)])
    start, end = (model.words.marks[f"<|im_{side}|>"] for side in ("start", "end"))
    after = model.words.encode("\nWhat is in the picture?")
    last = model.words.encode("assistant\n")
    assert ids[:2] == [1, start]
    assert ids[ids.index(END) + 1 :] == [*after, end, start, *last]


def test_the_image_and_its_mask_matter_to_what_is_generated(tmp_path: Path) -> None:
    model = Wemm(write_checkpoint(tmp_path / "a"))
    picture = noise(60, 40)
    ids = model.prompt_ids(ASK, [picture.size])
    result = model.generate(ids, [picture], 3)
    assert result.logits.shape == (3, model.config["text_config"]["vocab_size"])
    rows = model.embed_image(picture)
    whole = model.logits([*ids, *result.tokens], [rows])
    assert whole[len(ids) - 1 : -1].argmax(-1).tolist() == result.tokens
    without = model.logits(ids, [torch.zeros_like(rows)])[-1]
    assert (result.logits[0] - without).abs().max() > 0.1
    twice = Wemm(write_checkpoint(tmp_path / "b", lora_alpha=16)).generate(ids, [picture], 1)
    assert (result.logits[0] - twice.logits[0]).abs().max() > 0.1
