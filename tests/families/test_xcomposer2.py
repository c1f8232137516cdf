"""XComposer2, whole: pictures, prompts and answers equal those of a reference written from the models' description."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from services.decoder.models.plora import scales
from services.families import registry
from services.families.check import require_servable
from services.families.family import ItemSize
from services.families.xcomposer2.encoder import XComposer2Encoder
from services.families.xcomposer2.sizes import Tiling
from services.preprocess.worker.pixel_maker import PixelMaker
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.towers.encoder import pixel_item
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_name
from tessera.common.v1.media_pb2 import Modality
from tests.reference_models import xcomposer2
from tests.reference_models.common import IMAGE, read_json, write_json
from tests.support.chat_templates import chat_template
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import data_url, png
from tests.support.processes.answers import ask_all, assert_ends
from tests.support.processes.services_in_process import services_in_process
from tests.support.vision_encoder import tower_engine
from tests.test_checkpoint_split import load_decoder, names_read

SIZES = [(300, 180), (60, 400), (64, 64), (350, 340)]
TOKENS = 10


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="vl"), pytest.param(True, id="4khd", marks=pytest.mark.full)],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("xcomposer2") / "under-test"
    return xcomposer2.write_checkpoint(path, high_resolution=request.param, hd_num=3)


def picture(number: int) -> Image.Image:
    return Image.open(io.BytesIO(png(number, SIZES[number]))).convert("RGB")


@pytest.mark.parametrize("engine", tower_engine.ENGINES)
def test_rows_of_pictures_are_those_of_the_reference(
    folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower_engine.choose(engine, monkeypatch)
    checkpoint, reference = Checkpoint(folder), xcomposer2.XComposer2(folder)
    config = registry.find(checkpoint).processor_config(checkpoint)
    maker = PixelMaker(image_processor_name(config), config, None)
    assert maker.scaling is not None
    encoder = XComposer2Encoder(checkpoint, CpuDevice(torch.float32))
    pictures = [picture(number) for number in range(len(SIZES))]
    items = [pixel_item(maker.make(each)[0], scaling=maker.scaling) for each in pictures]
    for item, each, rows in zip(items, pictures, encoder.encode(items), strict=True):
        assert encoder.cost(item) == encoder.cost(encoder.sample(ItemSize(*each.size)))
        expected = reference.embed_image(each)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        if engine == "kernels":
            assert torch.equal(encoder.encode([item])[0], rows)


@pytest.mark.parametrize("respelt", ["GN", "gn"])
def test_the_marks_of_tiles_have_two_spellings_and_the_model_two_types(
    tmp_path: Path, respelt: str
) -> None:
    folder = xcomposer2.write_checkpoint(tmp_path, high_resolution=True, hd_num=1)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("_GN", f"_{respelt}"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "model_type": "internlmxcomposer2"})
    checkpoint = require_servable(folder)
    assert Tiling.read(checkpoint).most == 1
    assert scales(checkpoint)("self_attn.qkv_proj") == 2
    encoder = XComposer2Encoder(checkpoint, CpuDevice(torch.float32))
    rows = encoder.encode([encoder.sample(ItemSize(50, 50))])[0]
    assert len(rows) == Tiling.read(checkpoint).rows(50, 50)
    assert registry.find_decoder(checkpoint).decoder.endswith(":InternLM2")


@pytest.mark.parametrize(("side", "lines"), [(56, 4), (224, 3)])
def test_a_conversation_without_a_system_text_gets_that_of_the_models_own_chat(
    tmp_path: Path, side: int, lines: int
) -> None:
    folder = xcomposer2.write_checkpoint(tmp_path, img_size=side)
    checkpoint, reference = Checkpoint(folder), xcomposer2.XComposer2(folder)
    source = registry.find(checkpoint).chat_template(checkpoint)
    assert source is not None
    text = chat_template(source, {}).render([{"role": "user", "content": "Hi."}], True)
    assert text == reference.prompt([("user", "Hi.")])
    assert text.split(xcomposer2.END)[0].count("\n") == lines
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    turns = [("system", "Be brief."), ("user", "Hi.")]
    assert chat_template(source, {}).render(own, True) == reference.prompt(turns)


def test_no_size_takes_more_rows_than_the_largest(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    tiling = Tiling.read(checkpoint)
    largest = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
    found = {tiling.rows(w, h) for w in range(9, 2000, 97) for h in range(9, 2000, 61)}
    assert max(found) <= largest.tokens == tiling.rows(largest.width, largest.height)


def turns(number: int) -> list[tuple[str, str]]:
    asked = [("user", f"{IMAGE * (number % 3)}What is red? {'And blue? ' * number}".strip())]
    if number % 2:
        asked += [("assistant", "A circle."), ("user", f"{IMAGE}And then?")]
    return asked


def messages(number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    image = {"url": data_url(png(number, SIZES[number]))}
    for role, text in turns(number):
        parts: list[dict[str, Any]] = [{"type": "text", "text": text.replace(IMAGE, "")}]
        shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": image}]
        found.append({"role": role, "content": shown * text.count(IMAGE) + parts})
    return found


@pytest.mark.timeout(300)
def test_answers_are_those_of_the_reference(folder: Path, redis_url: str) -> None:
    reference = xcomposer2.XComposer2(folder)
    chats = [messages(number) for number in range(len(SIZES))]
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, chats, TOKENS)
        assert_ends(system.base_url, [2, reference.words.encode(xcomposer2.END)[0]])
    for number, (prompt, tokens) in enumerate(answers):
        shown = sum(text.count(IMAGE) for _, text in turns(number))
        ids = reference.prompt_ids(turns(number), [SIZES[number]] * shown)
        assert prompt == [max(0, token) for token in ids]
        made = reference.generate(ids, [picture(number)] * shown, TOKENS)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)


def test_every_tensor_is_read_by_one_service(folder: Path) -> None:
    def load_tower(checkpoint: Checkpoint) -> object:
        return XComposer2Encoder(checkpoint, CpuDevice(torch.float32))

    decoder, encoder = names_read(folder, load_decoder), names_read(folder, load_tower)
    assert not decoder & encoder
    left = set(Checkpoint(folder).names()) - decoder - encoder
    assert all("post_layernorm" in name for name in left), left
