"""BLIP-2 against transformers: ids with the picture in front, rows, tokens; what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.decoder.models.generic.loading import load_model
from services.families.check import Parts, require_servable
from services.families.family import ItemSize
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.generic import GenericEncoder
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import BadPixels, Item, pixel_item, to_array
from shared.artifacts.pixel_scaling import PixelScaling
from shared.artifacts.store import ArtifactReader, ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import model_class, read_config
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem
from tests.support.checkpoints import (
    blip2,
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

# A model by the code of transformers or beside it: others of the kind are tried in every run.
pytestmark = pytest.mark.full

NEW_TOKENS = 8
SIZES = [(28, 28), (100, 70), (31, 300)]
QUESTIONS = ["What?", "And what is beside it, and who is it that sees it from far away?", ""]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> GenericEncoder:
    encoder = load_encoder(Checkpoint(folder), CpuDevice(dtype))
    assert isinstance(encoder, GenericEncoder)
    return encoder


async def item_of(media: MediaItem) -> Item:
    """What the vision encoder makes of an item of a prompt."""
    reader = ArtifactReader()
    try:
        pixels = await reader.open(media.pixels)
    finally:
        await reader.close()
    found = media.scaling
    scaling = PixelScaling(found.factor, tuple(found.mean), tuple(found.std))
    return pixel_item(pixels, scaling=scaling)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"language": "qwen2"}, marks=pytest.mark.full),
        pytest.param({"text": {"tie_word_embeddings": True}}, marks=pytest.mark.full),
    ],
)
async def test_prompts_rows_and_tokens_are_those_of_the_class(
    tmp_path: Path, short_tmp: Path, make_preprocess: PreprocessMaker, options: dict[str, Any]
) -> None:
    """Six prompts, each with a picture or none: together in pieces, and one alone."""
    folder = make_checkpoint(tmp_path, "blip2", **options)
    model, encoder = load_reference(folder), load(folder)
    store = ArtifactStore(short_tmp / "rows", "producer", "")
    texts, references, refs, items = [], [], [], []
    async with make_preprocess(folder, "m") as service:
        for slot in range(2 * len(SIZES)):
            seen = picture(*SIZES[slot // 2], seed=slot)
            shown = [image(file_of(seen))] if slot % 2 == 0 else []
            asked = QUESTIONS[slot // 2]
            answer = await service.chat(turn("user", *([text(asked)] if asked else []), *shown))
            assert answer.text == (f"Question: {asked} Answer:" if asked else "")
            inputs = reference_inputs(folder, answer.text, [seen] if shown else [])
            assert ids_of(answer) == inputs["input_ids"][0].tolist()
            for media in answer.media:
                assert (media.offset, media.length, media.rows) == (0, blip2.ROWS, blip2.ROWS)
                items.append(await item_of(media))
                with torch.inference_mode():
                    expected = model.get_image_features(inputs["pixel_values"]).pooler_output[0]
                (rows,) = encoder.encode(items[-1:])
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
        alone = Text(7, texts[2].prompt, greedy(), media=texts[2].media)
        await scheduler.generate([alone], NEW_TOKENS)
        await scheduler.generate(texts, NEW_TOKENS, chunk=16)
    for said, (expected, logits) in zip(texts, references, strict=True):
        assert_same_up_to_ties(said.output, expected, logits)
    assert alone.output == texts[2].output


def generated(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by the class, and their logits."""
    asked = model if "pixel_values" in inputs else model.language_model
    with torch.no_grad():
        output = asked.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return output.sequences[0, -NEW_TOKENS:].tolist(), torch.cat(output.scores)


async def test_conversations(tmp_path: Path, make_preprocess: PreprocessMaker) -> None:
    folder = make_checkpoint(tmp_path, "blip2")
    shown = image(file_of(picture()))
    async with make_preprocess(folder, "m") as service:
        answer = await service.chat(
            turn("system", text("Be brief.")),
            turn("user", shown, text("Who?")),
            turn("assistant", text("A dog.")),
            turn("user", text("Is <image> here?")),
        )
        spoken = "Be brief. Question: Who? Answer: A dog. Question: Is <image> here? Answer:"
        assert answer.text == spoken
        token = reference_inputs(folder, "", [picture()])["input_ids"][0, 0].item()
        ids = ids_of(answer)
        assert ids[: blip2.ROWS] == [token] * blip2.ROWS and token not in ids[blip2.ROWS :]
        with pytest.raises(InvalidRequest, match="may have at most 1 image "):
            await service.chat(turn("user", shown, shown))


async def test_a_template_of_strings_is_given_the_words_alone(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    folder = make_checkpoint(tmp_path, "blip2", template=template)
    async with make_preprocess(folder, "m") as service:
        answer = await service.chat(turn("user", image(file_of(picture())), text("Who?")))
        assert answer.text == "[Who?]" and answer.media[0].offset == 0


@pytest.mark.parametrize("language", ["llama", "qwen2"])
def test_decoder_and_encoder_share_a_checkpoint_out(tmp_path: Path, language: str) -> None:
    folder = make_checkpoint(tmp_path, "blip2", language=language)
    checkpoint = Checkpoint(folder)
    kind, config = model_class(checkpoint), read_config(checkpoint)
    decoder = load_model(checkpoint, kind, config, torch.float32)
    decoders = set(parameters(decoder, shared=True))
    encoders = {name for name, _ in load(folder)._model.named_parameters()}
    assert not decoders & encoders
    assert decoders | encoders >= set(checkpoint.names())


def test_squares_of_another_size_are_refused(tmp_path: Path) -> None:
    encoder = load(make_checkpoint(tmp_path, "blip2"))
    sample = encoder.sample(ItemSize(640, 33))
    assert encoder.cost(sample) > 0 and encoder.encode([sample])[0].shape == (blip2.ROWS, 64)
    with pytest.raises(BadPixels, match=r"\[3, 28, 28\]"):
        encoder.cost(pixel_item(sample.pixels[..., :14]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"text_config": {"model_type": "t5"}}, "t5 has an encoder"),
        ({"use_decoder_only_language_model": False}, "has an encoder"),
        ({"image_token_index": None}, "image_token_index"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder = make_checkpoint(tmp_path, "blip2")
    path = folder / "config.json"
    path.write_text(json.dumps(load_config(folder) | changes))
    with pytest.raises(InvalidRequest, match=reason) as refused:
        require_servable(folder, parts=Parts.TOKENIZER)
    assert refused.value.reason == "UNSUPPORTED_MODEL"
