"""InternVL in its own layout against the reference implementation, which nothing of transformers' InternVL is in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.families import registry
from services.families.family import ItemSize, load_part
from services.preprocess.media.processor_config import read_processor_config
from services.preprocess.prompt.prompt_rule import ImageProcessing
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Item, pixel_item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_class, image_processor_name
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality
from tests.reference_models.common import noise
from tests.reference_models.internvl_chat import InternVLChat, write_checkpoint
from tests.support.chat_templates import chat_template
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    running_decoder,
)

PICTURES = [noise(50, 70, 1), noise(64, 64, 2), noise(200, 30, 3)]
TALK = [("user", "<image>and <image>What?"), ("assistant", "Dogs."), ("user", "<image>And this?")]
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "internlm2, map by columns": {"language": "InternLM2", "ps_version": "v1", "seed": 1},
    "llama, norms of queries and keys": {
        "language": "Llama",
        "vision": {"qk_normalization": True, "norm_type": "rms_norm", "qkv_bias": False},
    },
    "few tiles, an earlier layer": {"max_dynamic_patch": 3, "select_layer": -2},
}


@pytest.fixture(scope="module", params=OPTIONS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("internvl"), **OPTIONS[request.param])


def items_of(folder: Path, reference: InternVLChat) -> list[Item]:
    """What preprocess makes of the pictures; the reference makes the same."""
    settings = read_processor_config(folder)
    processor = image_processor_class(image_processor_name(settings)).from_dict(settings)
    items = []
    for picture in PICTURES:
        made = np.asarray(processor(images=picture, return_tensors="np")["pixel_values"])
        torch.testing.assert_close(torch.from_numpy(made), reference.pixel_values(picture))
        width, height = picture.size
        items.append(pixel_item(made.astype(np.float32), height=height, width=width))
    return items


def test_pixels_and_rows(folder: Path) -> None:
    reference = InternVLChat(folder)
    items = items_of(folder, reference)
    encoder = load_encoder(Checkpoint(folder), CpuDevice(torch.float32))
    assert encoder is not None
    for item, rows, picture in zip(items, encoder.encode(items), PICTURES, strict=True):
        assert encoder.cost(item) > 0
        torch.testing.assert_close(rows, reference.embed_image(picture), rtol=1e-4, atol=5e-5)


async def test_tokens_of_prompts_with_pictures(folder: Path, short_tmp: Path) -> None:
    """Eight at once in pieces of 16 tokens, with no picture to three."""
    reference, checkpoint = InternVLChat(folder), Checkpoint(folder)
    rule = load_part(registry.find(checkpoint).prompt)(checkpoint, ImageProcessing())
    spans = [rule.span(ItemSize(*picture.size)) for picture in PICTURES]
    store = ArtifactStore(short_tmp / "artifacts", "producer", "")
    digests = [f"image-{i}".encode().ljust(16, b"-") for i in range(len(PICTURES))]
    texts, shown = [], []
    for slot in range(8):
        turns = [TALK[-1:], TALK, [("user", f"Number {slot}?")]][slot % 3]
        order = [[slot % 2], [0, 1, 2], []][slot % 3]
        ids = reference.prompt_ids(turns, [PICTURES[i].size for i in order])
        starts = [place for place, token in enumerate(ids) if token == spans[0].token_ids[0]]
        media = []
        for i, start in zip(order, starts, strict=True):
            span = spans[i]
            assert tuple(ids[start : start + len(span.token_ids)]) == span.token_ids
            runs = [EmbedRun(start=first, length=count) for first, count in span.embed_runs]
            media.append(
                MediaItem(
                    digest=digests[i], modality=Modality.MODALITY_IMAGE, offset=start,
                    length=len(span.token_ids), rows=span.rows, embed_runs=runs,
                )
            )  # fmt: skip
        texts.append(Text(slot, ids, greedy(), media=media))
        shown.append([PICTURES[i] for i in order])
    async with (
        running_decoder(folder, short_tmp / "s", kv_cache_memory_bytes=64 << 20) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        rows = [reference.embed_image(picture).numpy() for picture in PICTURES]
        refs = [store.put(digest, row) for digest, row in zip(digests, rows, strict=True)]
        await stream.run(make_plan(fetch=refs))
        while len(stream.ready) < len(refs):
            await stream.next_message()
        await NaiveScheduler(stream).generate(texts, 6, chunk=16)
    for text, pictures in zip(texts[:4], shown, strict=False):
        expected = reference.generate(list(text.prompt), pictures, 6)
        assert_same_up_to_ties(text.output, expected.tokens, expected.logits)


@pytest.mark.parametrize("name", ["internlm2-chat", "internvl2_5"])
def test_the_chat_format_goes_by_the_template_named(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path, template=name))
    reference = InternVLChat(tmp_path)
    source = registry.find(checkpoint).chat_template(checkpoint)
    assert source is not None
    template = chat_template(source, {})
    talk = [("system", "Be brief."), ("user", "What?"), ("assistant", "Dogs."), ("user", "This?")]
    messages = [{"role": role, "content": text} for role, text in talk]
    assert template.render(messages, True) == reference.prompt(talk)
    assert "书生" in template.render(messages[1:], True)
