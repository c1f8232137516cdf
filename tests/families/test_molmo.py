"""Molmo against the reference implementation: pixel values, rows, prompts and tokens; what is refused by name."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from services.families import registry
from services.families.family import ItemSize
from services.preprocess.media.processor_config import read_processor_config
from services.vision_encoder.towers.encoder import BadPixels, pixel_item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_class, image_processor_name
from shared.errors import InvalidRequest
from shared.text.templates.processes import TemplateRefusal
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality
from tests.decoder.models.test_shapes import SharingScheduler
from tests.preprocess.prompt.test_counts import sizes
from tests.reference_models.common import noise
from tests.reference_models.molmo import Molmo, write_checkpoint
from tests.support.chat_templates import chat_template
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import StepStream, Text, greedy, make_plan, running_decoder
from tests.support.family_parts import encoder_of, rule_of
from tests.support.processes.answers import Chat, ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.vision_encoder import tower_engine
from tests.test_checkpoint_split import load_decoder, names_read

TALK = [("user", "<image>What?"), ("assistant", "Dogs."), ("user", "<image>And this?")]
PICTURES = [noise(50, 70, 1), noise(336, 336, 2), noise(900, 300, 3)]
WIDE_AND_HIGH = [*PICTURES, noise(333, 1100, 4)]
VARIANTS: dict[str, dict[str, Any]] = {
    "norms before": {},
    "norms after": {"norm_after": True, "qkv_bias": False},
    "norms of rows": {"attention_layer_norm": True},
    "norms after and of rows": {"norm_after": True, "attention_layer_norm": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("molmo"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Molmo:
    return Molmo(folder)


def test_pixels_are_resized_as_by_torch(folder: Path, reference: Molmo) -> None:
    settings = read_processor_config(folder)
    processor = image_processor_class(image_processor_name(settings)).from_dict(settings)
    for picture in WIDE_AND_HIGH:
        made = torch.from_numpy(processor(images=picture)["pixel_values"][0])
        # torch finds the places of pixels in float32, Pillow in float64: of noise that is a tenth of a byte's step.
        torch.testing.assert_close(made, reference.pixel_values(picture), rtol=0, atol=1e-3)


@pytest.mark.parametrize("engine", tower_engine.ENGINES)
def test_rows(folder: Path, reference: Molmo, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower_engine.choose(engine, monkeypatch)
    encoder = encoder_of(Checkpoint(folder))
    assert not encoder.stacked
    pictures = PICTURES[::2]
    items = [
        pixel_item(reference.pixel_values(picture).numpy(), height=picture.height, width=picture.width)
        for picture in pictures
    ]  # fmt: skip
    assert [encoder.cost(item) for item in items] == [576 * len(item.pixels) for item in items]
    together = encoder.encode(items)
    for rows, picture in zip(together, pictures, strict=True):
        expected = reference.embed_image(picture)
        close = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=close)
    assert torch.equal(encoder.encode(items[:1])[0], together[0])


@pytest.mark.parametrize("most", [3, 12])
def test_the_largest_picture(tmp_path: Path, most: int) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps({"max_crops": most}))
    checkpoint, rule = Checkpoint(folder), rule_of(folder)
    size = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
    span = rule.span(size)
    assert len(span.token_ids) == size.tokens
    assert all(len(rule.span(ItemSize(*drawn)).token_ids) <= size.tokens for drawn in sizes(300))
    encoder = encoder_of(checkpoint)
    sample = encoder.sample(size)
    assert len(sample.pixels) == 1 + most and encoder.cost(sample) == 576 * (1 + most)
    if most == 3:
        assert len(encoder.encode([sample])[0]) == span.rows


def test_ids_of_drawn_sizes(folder: Path, reference: Molmo) -> None:
    rule = rule_of(folder)
    for size in sizes(400):
        span, expected = rule.span(ItemSize(*size)), reference.image_ids(*size)
        assert list(span.token_ids) == expected
        patch = expected[1]
        places = [first + i for first, count in span.embed_runs for i in range(count)]
        assert places == [place for place, token in enumerate(expected) if token == patch]
        assert len(places) == span.rows


@pytest.mark.parametrize(
    ("variant", "chunk"),
    [
        ("norms before", 16),
        ("norms after and of rows", 16),
        pytest.param("norms before", 1024, marks=pytest.mark.full),
        pytest.param("norms after", 16, marks=pytest.mark.full),
        pytest.param("norms of rows", 16, marks=pytest.mark.full),
    ],
)
async def test_tokens(variant: str, chunk: int, tmp_path: Path, short_tmp: Path) -> None:
    """One alone, then seven more beside it, three of which begin with its blocks and two have no picture.

    Each token is the reference's choice after what stands before it.
    """
    folder = write_checkpoint(tmp_path, **VARIANTS[variant])
    reference, rule = Molmo(folder), rule_of(folder)
    store = ArtifactStore(short_tmp / "artifacts", "producer", "")
    pictures = PICTURES[:2]
    digests = [f"image-{i}".encode().ljust(16, b"-") for i in range(len(pictures))]
    rows = [reference.embed_image(picture) for picture in pictures]
    texts, asked = [], []
    for slot, shown in enumerate([[0], [0], [0], [0], [1], [0, 1], [], []]):
        turns = TALK if len(shown) == 2 else [("user", "<image>" * len(shown) + f"Number {slot}?")]
        ids = reference.prompt_ids(turns, [pictures[i].size for i in shown])
        media, start = [], 1
        for i in shown:
            span = rule.span(ItemSize(*pictures[i].size))
            assert tuple(ids[start : start + len(span.token_ids)]) == span.token_ids
            media.append(
                MediaItem(
                    digest=digests[i], modality=Modality.MODALITY_IMAGE, offset=start, rows=span.rows,
                    length=len(span.token_ids),
                    embed_runs=[EmbedRun(start=first, length=count) for first, count in span.embed_runs],
                )
            )  # fmt: skip
            start += len(span.token_ids)
        texts.append(Text(slot, ids, greedy(), media=media))
        asked.append(shown)
    async with (
        running_decoder(
            folder,
            short_tmp / "s",
            max_model_len=2048,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=64 << 20,
        ) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        refs = [store.put(d, r.numpy()) for d, r in zip(digests, rows, strict=True)]
        await stream.run(make_plan(fetch=refs))
        while len(stream.ready) < len(refs):
            await stream.next_message()
        scheduler = SharingScheduler(stream)
        await scheduler.generate(texts[:1], 5, chunk)
        scheduler.share(texts[0], texts[1:4], 256)
        await scheduler.generate(texts, 5, chunk)
    for text, shown in zip(texts, asked, strict=True):
        logits = reference.logits([*text.prompt, *text.output], [rows[i] for i in shown])
        chosen_from = logits[len(text.prompt) - 1 : -1]
        assert_same_up_to_ties(text.output, chosen_from.argmax(-1).tolist(), chosen_from)


def messages(turns: Sequence[tuple[str, str]], pictures: list[PIL.Image.Image]) -> Chat:
    """The turns with pictures in the places of their marks."""
    left = iter(pictures)
    found: list[dict[str, Any]] = []
    for role, text in turns:
        parts: list[dict[str, Any]] = []
        for piece in text.split("<image>")[:-1]:
            file = io.BytesIO()
            next(left).save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            parts += [{"type": "text", "text": piece}] if piece else []
            parts.append({"type": "image_url", "image_url": {"url": url}})
        parts.append({"type": "text", "text": text.split("<image>")[-1]})
        found.append({"role": role, "content": parts})
    return found


@pytest.mark.full
def test_the_whole_system(tmp_path: Path, redis_url: str) -> None:
    """Four requests at once, and again with cached prefixes."""
    folder = write_checkpoint(tmp_path / "under-test")
    # A template as released: it writes neither the first token nor pictures.
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(own)
    reference = Molmo(folder)
    chats = [
        (TALK, PICTURES[:2]),
        ([("user", "<image>What?")], PICTURES[1:2]),
        ([("user", "<image>What is in <image>this?")], [PICTURES[2], PICTURES[0]]),
        ([("user", "What?")], []),
    ]
    asked = [messages(*chat) for chat in chats]
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, asked, 6)
        again = ask_all(system.base_url, asked, 6)
    assert again == answers
    for (turns, pictures), (prompt, tokens) in zip(chats, answers, strict=True):
        assert prompt == reference.prompt_ids(turns, [picture.size for picture in pictures])
        expected = reference.generate(prompt, pictures, len(tokens))
        assert_same_up_to_ties(tokens, expected.tokens, expected.logits)


def test_roles_must_alternate(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    source = registry.find(checkpoint).chat_template(checkpoint)
    assert source is not None
    with pytest.raises(TemplateRefusal, match="alternate"):
        chat_template(source, {}).render([{"role": "system", "content": "Be brief."}], True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_read_by_one_service(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, **VARIANTS[variant])
    decoders, encoders = names_read(folder, load_decoder), names_read(folder, encoder_of)
    assert not decoders & encoders
    left = set(Checkpoint(folder).names()) - decoders - encoders
    # No state behind the tower's last layer leads to a row.
    assert left and all(".image_vit.transformer.resblocks.8." in name for name in left)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_norm_type": "default"}, "layer_norm_type"),
        ({"weight_tying": True}, "weight_tying"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"use_position_ids": False}, "use_position_ids"),
        ({"moe_num_experts": 64}, "moe_num_experts"),
        ({"block_type": "moe"}, "block_type"),
        ({"vit_layers": [-1]}, "vit_layers"),
        ({"image_pooling_2d": "stack"}, "image_pooling_2d"),
    ],
)
def test_another_model_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        registry.decoder_config(Checkpoint(write_checkpoint(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_image_input_size": [336, 378]}, "base_image_input_size"),
        ({"base_image_input_size": [378, 378]}, "base_image_input_size"),
        ({"overlap_margins": [3, 3]}, "overlap_margins"),
        ({"image_token_length_w": 24}, "image_token_length_w"),
        ({"image_padding_mask": False}, "image_padding_mask"),
        ({"image_patch_size": 28}, "image_token_length_h"),
    ],
)
def test_another_image_processor_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changes))
    with pytest.raises(InvalidRequest, match=message):
        registry.find(checkpoint).largest(Checkpoint(tmp_path), Modality.MODALITY_IMAGE)


def test_pictures_of_another_size_than_the_tower_sees_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path))
    smaller = {
        "base_image_input_size": [224, 224],
        "image_token_length_w": 8,
        "image_token_length_h": 8,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(smaller))
    with pytest.raises(InvalidRequest, match="256 of 588"):
        encoder_of(Checkpoint(checkpoint.folder))


@pytest.mark.parametrize(
    ("shape", "width", "height"),
    [
        ((2, 576, 588), 0, 0),
        ((3, 576, 588), 336, 336),
        ((2, 576, 587), 336, 336),
        ((2, 576), 50, 70),
    ],
)
def test_pixels_unlike_their_item_are_refused(
    folder: Path, shape: tuple[int, ...], width: int, height: int
) -> None:
    item = pixel_item(np.zeros(shape, np.float32), width=width, height=height)
    with pytest.raises(BadPixels):
        encoder_of(Checkpoint(folder)).cost(item)
