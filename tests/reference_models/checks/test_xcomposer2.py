"""The XComposer2 reference: counts, CLIP's features, the tiled map, the prompt, generation."""

import pytest
import torch
from PIL.Image import new
from transformers import CLIPVisionConfig, CLIPVisionModel

from tests.reference_models.common import PLACEHOLDER, below, noise
from tests.reference_models.xcomposer2 import TOWER, XComposer2, tiled_size, write_checkpoint

ASK = [("system", "You see."), ("user", "<image>What is <image>in the picture?")]


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> XComposer2:
    return XComposer2(write_checkpoint(tmp_path_factory.mktemp("vl")))


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> XComposer2:
    folder = tmp_path_factory.mktemp("4khd")
    return XComposer2(write_checkpoint(folder, high_resolution=True, patch_size=42))


def test_the_tower_is_clip_before_its_last_norm(square: XComposer2) -> None:
    config = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=16,
        image_size=56,
        patch_size=14,
    )
    model = CLIPVisionModel(config).eval()
    weights = below(square.tensors, TOWER)
    found = model.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    assert {name for name in found.missing_keys if "position_ids" not in name} == {
        "post_layernorm.weight",
        "post_layernorm.bias",
    }
    pixels = square.pixel_values(noise(30, 20))
    with torch.no_grad():
        theirs = model(pixels[None]).last_hidden_state[0, 1:]
    torch.testing.assert_close(square.tower(pixels), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("size", "hd_num", "expected"),
    [
        ((1000, 1000), 25, (5, 5, 1680, 1680)),
        ((1600, 900), 25, (6, 4, 2016, 1134)),
        ((900, 1600), 25, (4, 6, 1134, 2016)),
        ((3000, 300), 25, (12, 2, 4032, 403)),
        ((640, 480), 16, (4, 3, 1344, 1008)),
    ],
)
def test_images_get_the_largest_tiling(
    size: tuple[int, int], hd_num: int, expected: tuple[int, int, int, int]
) -> None:
    assert tiled_size(*size, hd_num) == expected


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (50, 50), (300, 30)])
def test_rows_are_as_many_as_placeholders(
    square: XComposer2, tiled: XComposer2, size: tuple[int, int]
) -> None:
    assert square.embed_image(noise(*size)).shape == (16, 64)
    rows = tiled.embed_image(noise(*size))
    columns, lines, _, _ = tiled_size(*size, 4)
    assert rows.shape == ((columns * lines + 1) * 16 + 1 + (lines + 1) * 4, 64)
    ids = tiled.prompt_ids(ASK, [size, size])
    assert ids.count(PLACEHOLDER) == 2 * len(rows)


def test_a_portrait_is_padded_at_its_sides_in_white(tiled: XComposer2) -> None:
    pixels = tiled.pixel_values(new("RGB", (30, 100), "black"))
    assert pixels.shape == (3, 3 * 336, 336)
    black, white = pixels[:, 0, 336 // 2], pixels[:, 0, 0]
    assert (white > 1.9).all()
    assert (black < -1.4).all()


def test_lines_of_the_map_end_in_the_separator(tiled: XComposer2) -> None:
    features = tiled.tiles(tiled.pixel_values(noise(50, 50)))
    end, between = tiled.tensors["plora_sub_GN"].flatten(), tiled.tensors["plora_glb_GN"].flatten()
    assert [i for i, row in enumerate(features) if torch.equal(row, end)] == [
        *range(4, 20, 5),
        *range(29, 93, 9),
    ]
    assert torch.equal(features[20], between)
    # Cell (0, 1) of the first local line is patches (0, 2), (0, 3), (1, 2), (1, 3) of the first tile.
    tile = tiled.tower(tiled.pixel_values(noise(50, 50))[:, :336, :336]).view(8, 8, -1)
    torch.testing.assert_close(features[22], tile[:2, 2:4].flatten())


def test_each_part_of_the_text_begins_with_bos(square: XComposer2) -> None:
    ids = square.prompt_ids(ASK, [(9, 9), (9, 9)])
    assert ids.count(1) == 3
    after = [ids[i + 1] for i, token in enumerate(ids) if token == PLACEHOLDER]
    assert [token for token in after if token != PLACEHOLDER] == [1, 1]
    text = square.prompt(ASK)
    assert text.startswith("[UNUSED_TOKEN_146]system\nYou see.[UNUSED_TOKEN_145]\n")
    assert text.endswith("picture?[UNUSED_TOKEN_145]\n[UNUSED_TOKEN_146]assistant\n")


@pytest.mark.parametrize("kind", ["square", "tiled"])
def test_images_matter_to_what_is_generated(kind: str, request: pytest.FixtureRequest) -> None:
    model: XComposer2 = request.getfixturevalue(kind)
    pictures = [noise(30, 20), noise(30, 20, seed=1)]
    ids = model.prompt_ids(ASK, [picture.size for picture in pictures])
    result = model.generate(ids, pictures, 1)
    rows = torch.zeros(ids.count(PLACEHOLDER), 64)
    assert (result.logits[0] - model.logits(ids, [rows])[-1]).abs().max() > 0.1
