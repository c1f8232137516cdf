"""Molmo2 beyond what every model has that the code of transformers runs: its pictures, one a prompt, and its tokens."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.decoder import GenericDecoder
from services.families import registry
from services.families.check import Parts, require_servable
from services.families.molmo2 import FAMILY
from services.families.molmo2.image_processor import Molmo2ImageProcessor
from services.families.molmo2.sizes import Cells
from services.gateway.model.served_model import ServedModel
from services.vision_encoder.devices.cpu.device import CpuDevice as EncoderCpu
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality
from tessera.preprocess.v1.preprocess_pb2 import Media, Part, PrepareRequest, Video
from tests.decoder.models.test_generic_media import NEW_TOKENS, Prepared
from tests.decoder.models.test_shapes import SharingScheduler
from tests.preprocess.prompt.test_counts import sizes
from tests.reference_models.common import noise
from tests.reference_models.image_processors.molmo2_images import Molmo2Images
from tests.support.checkpoints import generic, load_config, make_checkpoint
from tests.support.compared import take_as_compared
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import StepStream, Text, greedy, make_plan, running_decoder
from tests.support.preprocess.service import (
    PreprocessMaker,
    file_of,
    ids_of,
    image,
    picture,
    text,
    turn,
)

# A model by the code of transformers or beside it: others of the kind are tried in every run.
pytestmark = pytest.mark.full

SETTINGS: dict[str, dict[str, Any]] = {
    "as released": {},
    "many crops": {"max_crops": 24},
    "one margin": {"size": {"height": 56, "width": 56}, "overlap_margins": [1, 0], "max_crops": 5,
                   "pooling_size": [2, 3]},
    "no margins": {"size": {"height": 56, "width": 56}, "overlap_margins": [0, 0], "max_crops": 6},
    "incomplete cells": {"size": {"height": 70, "width": 70}, "overlap_margins": [1, 2],
                         "max_crops": 4, "pooling_size": [3, 2], "image_mean": [0.48, 0.45, 0.4],
                         "image_std": [0.26, 0.27, 0.28]},
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
# As of the releases: with norms of heads, and with norms behind attention and MLP and rotations scaled in some layers.
TEXTS: list[dict[str, Any]] = [
    {},
    {"norm_after": True, "qk_norm_type": "olmo", "rope_scaling_layers": [1],
     "rope_parameters": {**_YARN, "original_max_position_embeddings": 64}},
]  # fmt: skip
# Margins leave nothing of (112, 112), and less than nothing of what is smaller.
PICTURES = [(1, 90), (28, 28), (112, 112), (112, 500), (333, 40), (640, 400), (601, 900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("molmo2"), "molmo2")


def reference_of(changes: dict[str, Any]) -> Molmo2Images:
    names = {"size": "side", "overlap_margins": "margins", "max_crops": "most", "patch_size": "patch",
             "pooling_size": "pool", "image_mean": "mean", "image_std": "std"}  # fmt: skip
    given = {names[key]: value for key, value in changes.items()}
    if "side" in given:
        given["side"] = given["side"]["height"]
    return Molmo2Images(**given)


@pytest.mark.parametrize("name", SETTINGS)
def test_pictures_are_cut_as_described(name: str) -> None:
    processor, reference = Molmo2ImageProcessor(**SETTINGS[name]), reference_of(SETTINGS[name])
    step = float(1 / 255 / min(reference.std))  # of a byte
    for number, size in enumerate(PICTURES):
        shown = noise(*size, number)
        made, expected = processor(shown, return_tensors="np"), reference(shown)
        assert made["image_token_pooling"].tolist() == expected.pooling
        assert made["image_grids"].tolist() == [expected.grid]
        assert made["image_num_crops"].tolist() == [len(expected.pixels)]
        assert made["pixel_values"].shape == expected.pixels.shape
        # torch adds the four pixels in an order that depends on its threads: a sum may be rounded the other way.
        apart = np.abs(made["pixel_values"] - expected.pixels.numpy())
        assert apart.max() < 1.01 * step and (apart > 0.01 * step).mean() < 2e-3


@pytest.mark.parametrize("name", SETTINGS)
def test_how_a_picture_is_cut_follows_from_its_size(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Molmo2ForConditionalGeneration"]}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS[name]))
    checkpoint, reference = Checkpoint(tmp_path), reference_of(SETTINGS[name])
    cells, most = Cells.read(checkpoint), FAMILY.largest(checkpoint, Modality.MODALITY_IMAGE)
    for width, height in sizes(300):
        tiling = reference.tiling(width, height)
        assert cells.cropping.tiling(width, height) == tiling
        assert cells.tokens(tiling) <= most.tokens
    assert cells.tokens(reference.tiling(most.width, most.height)) == most.tokens


def test_several_pictures_are_numbered_one_after_the_other() -> None:
    processor = Molmo2ImageProcessor(**SETTINGS["one margin"])
    shown = [noise(100, 90, 1), noise(30, 300, 2)]
    first, second = (processor(one, return_tensors="np") for one in shown)
    made = processor(shown, return_tensors="np")
    before = first["pixel_values"].shape[0] * first["pixel_values"].shape[1]
    moved = np.where(second["image_token_pooling"] < 0, -1, second["image_token_pooling"] + before)
    expected = np.concatenate([first["image_token_pooling"], moved])
    np.testing.assert_array_equal(made["image_token_pooling"], expected)
    for name in ("pixel_values", "image_grids", "image_num_crops"):
        np.testing.assert_array_equal(made[name], np.concatenate([first[name], second[name]]))


@pytest.mark.parametrize("named", ["bos_token", "eos_token"])
async def test_prompts_begin_with_the_first_token_once(
    tmp_path: Path, make_preprocess: PreprocessMaker, named: str
) -> None:
    folder = make_checkpoint(tmp_path, "molmo2")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if named == "eos_token":
        config.pop("bos_token")
    path.write_text(json.dumps(config))
    processor, first = generic.processor(folder), config[named]
    async with make_preprocess(folder, "m") as service:
        for prompt in ("Who?", f"{first}Who?"):
            answer = await service.prepare(PrepareRequest(text=prompt))
            made = processor(text=[prompt], return_tensors="np")["input_ids"][0].tolist()
            assert ids_of(answer) == made and made.count(made[0]) == 1
        talk = await service.chat(turn("user", text("Who?")))
        assert ids_of(talk)[0] == made[0]
        ids = np.array([5, 6, 7], "<i4")
        sent = await service.prepare(PrepareRequest(token_ids=ids.tobytes()))
        assert ids_of(sent) == [5, 6, 7]


async def test_files_as_released_are_understood(
    folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    """With older keys, a tower of more layers than are stored, and code for older versions of transformers."""
    released = shutil.copytree(folder, tmp_path / "released")
    config = load_config(folder)
    vision, adapter = config.pop("vision_config"), config["adapter_config"]
    adapter["vit_layers"] = adapter.pop("vision_feature_layer")
    for old, new in (
        ("image_default_input_size", "image_size"),
        ("image_patch_size", "patch_size"),
        ("image_num_pos", "num_position_embeddings"),
    ):
        vision[old] = vision.pop(new)
    config["vit_config"] = {**vision, "num_hidden_layers": 5}
    config["auto_map"] = {"AutoConfig": "configuration_molmo2.Molmo2Config"}
    (released / "config.json").write_text(json.dumps(config))
    for name, kind in (("preprocessor", "AutoImageProcessor"), ("processor", "AutoProcessor")):
        path = released / f"{name}_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {kind: "a.B"}}))
    require_servable(released, trust_remote_code=False)
    GenericDecoder.load(Checkpoint(released), CpuDevice(torch.float32).ops, 128)
    made: Any = generic.processor(released)(
        text=["<|image|>"], images=[picture()], return_tensors="np"
    )
    rows = [
        load_encoder(Checkpoint(one), EncoderCpu(torch.float32)).encode(  # type: ignore[union-attr]
            [Item(generic.item_tensors(one, made))]
        )[0]
        for one in (folder, released)
    ]
    assert torch.equal(*rows)
    async with make_preprocess(released, "m") as service:
        answer = await service.prepare(PrepareRequest(text="Who?"))
        assert ids_of(answer)[0] == 0


async def test_a_prompt_has_one_picture_and_no_video(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    shown = image(file_of(picture()))
    video = Part(video=Video(frames=[Media(data=file_of(picture()))], field="v"))
    async with make_preprocess(folder, "m") as service:
        answer = await service.chat(turn("user", shown, text("Is <im_patch> <|image|> here?")))
        [item] = answer.media
        taking = np.flatnonzero(np.isin(ids_of(answer), generic.row_ids(folder)))
        assert taking.tolist() == list(range(item.offset, item.offset + item.length))
        assert item.rows == item.length and not item.embed_runs
        with pytest.raises(InvalidRequest, match="may have at most 1 image "):
            await service.chat(turn("user", shown, shown))
        with pytest.raises(InvalidRequest, match="takes no videos"):
            await service.chat(turn("user", video))


def test_marks_and_separators_take_rows_of_zeros(folder: Path) -> None:
    encoder = load_encoder(Checkpoint(folder), EncoderCpu(torch.float32))
    processor = generic.processor(folder)
    for size in ((100, 70), (31, 300)):
        made: Any = processor(text=["<|image|>"], images=[picture(*size)], return_tensors="np")
        [rows] = encoder.encode([Item(generic.item_tensors(folder, made))])  # type: ignore[union-attr]
        ids = made["input_ids"][0][1:]  # behind the token that begins every prompt
        assert rows.any(1).tolist() == (ids == load_config(folder)["image_patch_id"]).tolist()


@pytest.mark.full
@pytest.mark.parametrize("text", TEXTS[:2])
async def test_whole_pictures_are_taken_from_the_prefix_cache(
    text: dict[str, Any], tmp_path: Path, short_tmp: Path
) -> None:
    folder = make_checkpoint(tmp_path, "molmo2", text=text)
    prepared = Prepared(folder, ArtifactStore(short_tmp / "artifacts", "producer", ""))
    leader = prepared.text(0, [(100, 70)])
    expected, logits = prepared.expected()
    others = [Text(slot, leader.prompt, greedy(), media=leader.media) for slot in (1, 2)]
    end = leader.media[0].offset + leader.media[0].length
    async with (
        running_decoder(take_as_compared(folder), short_tmp / "s", block_size=4) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        await stream.run(make_plan(fetch=prepared.refs))
        while len(stream.ready) < len(prepared.refs):
            await stream.next_message()
        scheduler = SharingScheduler(stream)
        await scheduler.generate([leader], NEW_TOKENS)
        scheduler.share(leader, others[:1], end + 3)  # begins behind the picture
        scheduler.share(leader, others[1:], leader.media[0].offset)  # and before it
        await scheduler.generate(others, NEW_TOKENS)
    assert_same_up_to_ties(leader.output, expected, logits)
    assert all(other.output == leader.output for other in others)


async def test_ids_of_pictures_tokens_are_inside_the_vocabulary(
    folder: Path, short_tmp: Path
) -> None:
    config = load_config(folder)["text_config"]
    known = config["vocab_size"] + config["additional_vocab_size"]
    assert ServedModel.load(folder, "m").vocab_size == known
    async with (
        running_decoder(take_as_compared(folder), short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        scheduler = SharingScheduler(stream)
        said = Text(0, [5, known - 1, 7], greedy(repetition_penalty=1.5, prompt_logprobs=2))
        await scheduler.generate([said], NEW_TOKENS)
        assert all(0 <= token < config["vocab_size"] for token in said.output)
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            await scheduler.generate([Text(1, [5, known, 7], greedy())], 1)


def test_a_record_without_a_bound_on_pictures_is_refused_at_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {key: value for key, value in FAMILY.overrides.items() if key != "most_images"}
    unbound = dataclasses.replace(FAMILY, overrides=left)
    monkeypatch.setattr(registry, "in_tree", lambda: (unbound,))
    with pytest.raises(InvalidRequest, match="how the tokens of its images see each other"):
        GenericDecoder.load(Checkpoint(folder), CpuDevice(torch.float32).ops, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 56, "width": 70}}, "size"),
        ({"size": {"height": 50, "width": 50}}, "size"),
        ({"overlap_margins": [2, 2]}, "overlap_margins"),
        ({"max_crops": 0}, "max_crops"),
        ({"pooling_size": [0, 2]}, "pooling_size"),
        ({"resample": 3}, "resample"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_normalize": False}, "do_normalize"),
    ],
)
def test_another_image_processor_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_checkpoint(tmp_path, "molmo2")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InvalidRequest, match=f": {message} .* is not served"):
        require_servable(folder, parts=Parts.TOKENIZER)


def test_pictures_of_any_mode_are_taken() -> None:
    processor = Molmo2ImageProcessor(**SETTINGS["no margins"])
    grey = PIL.Image.fromarray(np.arange(60 * 50, dtype=np.uint8).reshape(60, 50))
    for mode in ("L", "RGBA", "P"):
        found, colours = (processor(one, return_tensors="np")["pixel_values"]
                          for one in (grey.convert(mode), grey.convert(mode).convert("RGB")))  # fmt: skip
        np.testing.assert_array_equal(found, colours)
