"""Fuyu against transformers: ids of drawn sizes, patches, rows, tokens; what is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.decoder.models.generic.loading import load_model
from services.families import registry
from services.families.check import Parts, require_servable
from services.families.family import ItemSize
from services.families.fuyu.encoder import FuyuEncoder
from services.families.fuyu.prompt import FuyuRule
from services.preprocess.media.processor_config import read_processor_config
from services.preprocess.prompt.prompt_rule import ImageProcessing
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import BadPixels, Item, PixelArray, pixel_item, to_array
from shared.artifacts.pixel_scaling import PixelScaling
from shared.artifacts.store import ArtifactReader, ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import model_class, read_config
from shared.checkpoint.processor import image_processor_class, image_processor_name
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tests.preprocess.prompt.test_counts import sizes
from tests.support.checkpoints import (
    fuyu,
    load_config,
    load_reference,
    make_checkpoint,
    reference_inputs,
)
from tests.support.compared import take_as_compared
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    running_decoder,
)
from tests.support.generic_models import parameters
from tests.support.preprocess.service import (
    PreprocessMaker,
    file_of,
    ids_of,
    image,
    picture,
    text,
    turn,
)
from tests.test_checkpoint_split import names_read

NEW_TOKENS = 8
SIZES = [(28, 28), (100, 70), (31, 300), (90, 60)]
QUESTIONS = [
    "What?",
    "And what is beside it, and who is it that sees it from far away?",
    "",
    "the cat is",
]
RELEASED = {"height": 1080, "width": 1920}
COLOURS: list[dict[str, Any]] = [
    {},
    {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "padding_value": 7},
    {"resample": 3, "rescale_factor": 1 / 127},
]


def load(folder: Path) -> FuyuEncoder:
    encoder = load_encoder(Checkpoint(folder), CpuDevice(torch.float32))
    assert isinstance(encoder, FuyuEncoder)
    return encoder


def change(folder: Path, file: str, changes: dict[str, Any]) -> None:
    """Of a JSON file; None takes a key away."""
    content = json.loads((folder / file).read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / file).write_text(json.dumps(kept))


def drawn_sizes(count: int) -> list[tuple[int, int]]:
    """Without those that transformers shrinks to nothing."""
    return [size for size in sizes(count, 400) if max(size) < 60 * min(size)]


def rule_of(folder: Path) -> FuyuRule:
    return FuyuRule(Checkpoint(folder), ImageProcessing())


async def pixels_of(media: MediaItem) -> PixelArray:
    """Of an item of a prompt, while the service runs that made it."""
    reader = ArtifactReader()
    try:
        return await reader.open(media.pixels)
    finally:
        await reader.close()


async def item_of(media: MediaItem) -> Item:
    """What the vision encoder makes of an item of a prompt, whose colours are bytes."""
    pixels, found = await pixels_of(media), media.scaling
    assert pixels.dtype == np.uint8
    scaling = PixelScaling(found.factor, tuple(found.mean), tuple(found.std))
    return pixel_item(pixels, height=media.height, width=media.width, scaling=scaling)


@pytest.mark.full
async def test_prompts_rows_and_tokens_are_those_of_the_class(
    tmp_path: Path, short_tmp: Path, make_preprocess: PreprocessMaker
) -> None:
    """Eight prompts, each with a picture or none: together in pieces of 16 tokens, and one alone."""
    folder = make_checkpoint(tmp_path, "fuyu")
    model, encoder = load_reference(folder), load(folder)
    store = ArtifactStore(short_tmp / "rows", "producer", "")
    texts, references, refs, items = [], [], [], []
    async with make_preprocess(folder, "m") as service:
        for slot in range(2 * len(SIZES)):
            seen = picture(*SIZES[slot // 2], seed=slot)
            shown = [image(file_of(seen))] if slot % 2 == 0 else []
            asked = QUESTIONS[slot // 2]
            answer = await service.chat(turn("user", *([text(asked)] if asked else []), *shown))
            assert answer.text == f"{asked}\n"
            inputs = reference_inputs(folder, answer.text, [seen] if shown else [])
            assert ids_of(answer) == inputs["input_ids"][0].tolist()
            for media in answer.media:
                assert media.offset == 0
                items.append(await item_of(media))
                with torch.inference_mode():
                    expected = model.model.vision_embed_tokens(inputs["pixel_values"][0])
                (rows,) = encoder.encode(items[-1:])
                assert len(rows) == media.rows == encoder.cost(items[-1])
                torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
                refs.append(store.put(media.digest, to_array(rows)[0]))
            texts.append(Text(slot, ids_of(answer), greedy(), media=list(answer.media)))
            references.append(generated(model, inputs))
    alone_rows = [encoder.encode([item])[0] for item in items]
    assert all(map(torch.equal, encoder.encode(items), alone_rows))
    async with (
        running_decoder(take_as_compared(folder), short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        await stream.run(make_plan(fetch=refs))
        while len(stream.ready) < len(refs):
            await stream.next_message()
        scheduler = NaiveScheduler(stream)
        alone = Text(9, texts[2].prompt, greedy(), media=texts[2].media)
        await scheduler.generate([alone], NEW_TOKENS)
        await scheduler.generate(texts, NEW_TOKENS, chunk=16)
    for said, (expected, logits) in zip(texts, references, strict=True):
        assert_same_up_to_ties(said.output, expected, logits)
    assert alone.output == texts[2].output


def generated(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by the class, and their logits."""
    with torch.no_grad():
        output = model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return output.sequences[0, -NEW_TOKENS:].tolist(), torch.cat(output.scores)


def test_ids_of_drawn_sizes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "fuyu")
    rule = rule_of(folder)
    drawn = [*drawn_sizes(60), (90, 60), (91, 60), (90, 61), (89, 59), (1, 1), (10, 11)]
    for width, height in drawn:
        inputs = reference_inputs(folder, "What?\n", [picture(width, height)])
        ids = inputs["input_ids"][0].tolist()
        span = rule.span(ItemSize(width, height))
        assert list(span.token_ids) == ids[: len(span.token_ids)] and span.token_ids[-1] == 1
        places = [first + i for first, count in span.embed_runs for i in range(count)]
        assert places == [place for place, token in enumerate(ids) if token == ids[0]]
        assert len(places) == span.rows == len(inputs["pixel_values"][0])


@pytest.mark.parametrize("options", COLOURS)
def test_patches_are_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, "fuyu", images=options)
    settings = read_processor_config(folder)
    processor = image_processor_class(image_processor_name(settings)).from_dict(settings)
    for size in [*SIZES, *drawn_sizes(20)]:
        seen = picture(*size)
        expected = reference_inputs(folder, "What?\n", [seen])["pixel_values"][0].numpy()
        assert np.array_equal(processor(images=seen)["pixel_values"][0], expected)


async def test_colours_that_differ_by_channel(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    """They travel as float32."""
    folder, seen = make_checkpoint(tmp_path, "fuyu", images=COLOURS[1]), picture(33, 44)
    async with make_preprocess(folder, "m") as service:
        answer = await service.chat(turn("user", image(file_of(seen)), text("What?")))
        pixels = await pixels_of(answer.media[0])
    expected = reference_inputs(folder, "What?\n", [seen])["pixel_values"][0].numpy()
    assert pixels.dtype == np.float32 and np.array_equal(pixels, expected)


@pytest.mark.parametrize("size", [fuyu.SIZE, RELEASED])
def test_the_largest_picture(tmp_path: Path, size: dict[str, int]) -> None:
    folder = make_checkpoint(tmp_path, "fuyu")
    change(folder, "preprocessor_config.json", {"size": size})
    checkpoint, rule = Checkpoint(folder), rule_of(folder)
    found = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
    span, encoder = rule.span(found), load(folder)
    assert len(span.token_ids) == found.tokens
    assert all(len(rule.span(ItemSize(*some)).token_ids) <= found.tokens for some in sizes(400))
    sample = encoder.sample(found)
    assert encoder.cost(sample) == span.rows
    assert encoder.encode([sample])[0].shape == (span.rows, 64)


def test_the_largest_picture_as_released(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["FuyuForCausalLM"]}')
    checkpoint = Checkpoint(tmp_path)
    found = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
    assert (found.width, found.height, found.tokens) == (1920, 1080, 36 * 65 + 1)


async def test_conversations(tmp_path: Path, make_preprocess: PreprocessMaker) -> None:
    folder = make_checkpoint(tmp_path, "fuyu")
    seen = picture()
    shown = image(file_of(seen))
    async with make_preprocess(folder, "m") as service:
        answer = await service.chat(
            turn("system", text("Be brief.")),
            turn("user", text("What is "), shown, text("this?")),
            turn("assistant", text("A cat.")),
            turn("user", text("What is the cat?")),
        )
        assert answer.text == "Be brief.\nWhat is this?\nA cat.\nWhat is the cat?\n"
        expected = reference_inputs(folder, answer.text, [seen])["input_ids"][0].tolist()
        assert ids_of(answer) == expected
        written = await service.chat(
            turn("user", shown, text("|SPEAKER|, |NEWLINE|, <s> and <0x04> are words."))
        )
        span = written.media[0].length
        assert not {260, 261, 1, 7} & set(ids_of(written)[span:-1]) and ids_of(written)[-1] == 7
        with pytest.raises(InvalidRequest, match="may have at most 1 image "):
            await service.chat(turn("user", shown, shown))


@pytest.mark.parametrize("named_by_modules", [False, True])
def test_decoder_and_encoder_share_a_checkpoint_out(tmp_path: Path, named_by_modules: bool) -> None:
    folder = make_checkpoint(tmp_path, "fuyu", spelling="new" if named_by_modules else "saved")
    checkpoint = Checkpoint(folder)
    kind, config = model_class(checkpoint), read_config(checkpoint)
    decoder = load_model(checkpoint, kind, config, torch.float32)
    decoders = set(parameters(decoder, shared=True))
    encoders = {fuyu.respelt(name, "new") for name in names_read(folder, lambda it: load_named(it))}
    assert encoders == {"model.vision_embed_tokens.weight", "model.vision_embed_tokens.bias"}
    assert not decoders & encoders
    assert decoders | encoders == {fuyu.respelt(name, "new") for name in checkpoint.names()}


def load_named(checkpoint: Checkpoint) -> object:
    return load_encoder(checkpoint, CpuDevice(torch.float32))


def test_a_flat_configuration_is_read(tmp_path: Path) -> None:
    """As files before `text_config` have it."""
    folder = make_checkpoint(tmp_path, "fuyu")
    words = load_config(folder)["text_config"]
    kept = {key: value for key, value in words.items() if key not in ("model_type", "dtype")}
    change(folder, "config.json", {"text_config": None, **kept})
    checkpoint = require_servable(folder)
    assert registry.text_sizes(checkpoint).hidden_size == 64 == load(folder).hidden_size


def test_pixels_of_another_size_are_refused(tmp_path: Path) -> None:
    encoder = load(make_checkpoint(tmp_path, "fuyu"))
    sample = encoder.sample(ItemSize(640, 33))
    with pytest.raises(BadPixels, match=r"\[8, 300\]; a picture of 640x33 has \[9, 300\]"):
        encoder.cost(pixel_item(sample.pixels[1:], height=33, width=640))
    with pytest.raises(BadPixels, match="how large"):
        encoder.cost(pixel_item(sample.pixels))


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"num_channels": 1}, "num_channels is 1"),
        ("config.json", {"patch_size": 30}, "patch_size is .* with patches of 30"),
        ("preprocessor_config.json", {"patch_size": {"height": 10, "width": 20}}, "patch_size"),
        ("preprocessor_config.json", {"size": {"height": 65, "width": 90}}, "size is .*65"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize is False"),
        ("preprocessor_config.json", {"do_pad": False}, "do_pad is False"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize is False"),
        ("preprocessor_config.json", {"padding_mode": "edge"}, "padding_mode is 'edge'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    folder = make_checkpoint(tmp_path, "fuyu")
    change(folder, file, changes)
    with pytest.raises(InvalidRequest, match=reason) as refused:
        require_servable(folder, parts=Parts.TOKENIZER)
    assert refused.value.reason == "UNSUPPORTED_MODEL"


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "fuyu")
    change(folder, "config.json", {"image_token_id": 5})
    with pytest.raises(InvalidRequest, match=r"\|SPEAKER\| is token 260.* is 5"):
        rule_of(folder)
    tokens = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokens.replace("|NEWLINE|", "|newline|"))
    with pytest.raises(InvalidRequest, match=r"lacks \|NEWLINE\|"):
        rule_of(folder)
