"""WeMM, whole: pictures, prompts and answers equal those of a reference written from the model's description alone."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError
from PIL import Image

from services.families import registry
from services.families.chat_format import find_template
from services.families.check import require_servable
from services.families.wemm.encoder import WeMMEncoder
from services.preprocess.worker.pixel_maker import PixelMaker
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.towers.encoder import pixel_item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_name
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tests.reference_models import wemm
from tests.reference_models.common import IMAGE, read_json, write_json
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    running_decoder,
)
from tests.support.pictures import data_url, png
from tests.support.processes.answers import ask_all, assert_ends
from tests.support.processes.services_in_process import services_in_process
from tests.support.vision_encoder import tower_engine
from tests.test_checkpoint_split import load_decoder, names_read

SIZES = [(300, 180), (90, 400), (64, 64), (40, 500), (280, 281), (500, 333)]
TOKENS = 12


@pytest.fixture(scope="module", params=[False, True], ids=["2k", "stock"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both ways to resize pictures; an alpha that is not the rank."""
    path = tmp_path_factory.mktemp("wemm") / "under-test"
    return wemm.write_checkpoint(path, stock=request.param, lora_alpha=12, depth=3)


def picture(number: int) -> Image.Image:
    return Image.open(io.BytesIO(png(number, SIZES[number]))).convert("RGB")


@pytest.mark.parametrize("engine", tower_engine.ENGINES)
def test_rows_of_pictures_are_those_of_the_reference(
    folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower_engine.choose(engine, monkeypatch)
    checkpoint, reference = Checkpoint(folder), wemm.Wemm(folder)
    config = registry.find(checkpoint).processor_config(checkpoint)
    maker = PixelMaker(image_processor_name(config), config, None)
    assert maker.scaling is not None
    encoder = WeMMEncoder(checkpoint, CpuDevice(torch.float32))
    pictures = [picture(number) for number in range(len(SIZES))]
    items = [pixel_item(maker.make(each)[0], scaling=maker.scaling) for each in pictures]
    for item, each, rows in zip(items, pictures, encoder.encode(items), strict=True):
        expected = reference.embed_image(each)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        if engine == "kernels":
            assert torch.equal(encoder.encode([item])[0], rows)


def turns(number: int) -> list[tuple[str, str]]:
    asked = [("user", f"{IMAGE if number % 4 else ''}What is red? {'And blue? ' * number}".strip())]
    if number % 3 == 2:
        asked += [("assistant", "A circle."), ("user", "And then?")]
    return asked


def messages(number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for role, text in turns(number):
        parts: list[dict[str, Any]] = [{"type": "text", "text": text.replace(IMAGE, "")}]
        if IMAGE in text:
            url = data_url(png(number, SIZES[number]))
            # Before the text or behind it: the prompt is the same.
            parts.insert(number % 2, {"type": "image_url", "image_url": {"url": url}})
        found.append({"role": role, "content": parts})
    return found


@pytest.mark.timeout(300)
def test_answers_are_those_of_the_reference(folder: Path, redis_url: str) -> None:
    """Six at once, with and without a picture, then the same with all prefixes in the cache."""
    reference = wemm.Wemm(folder)

    chats = [messages(number) for number in range(len(SIZES))]
    two = messages(1)
    two[0]["content"] += two[0]["content"][-1:]
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, chats, TOKENS)
        assert ask_all(system.base_url, chats, TOKENS) == answers
        assert_ends(system.base_url, [2, reference.words.marks["<|im_end|>"]])
        with pytest.raises(BadRequestError, match="may have at most 1 image "):
            ask_all(system.base_url, [two], TOKENS)
    for number, (prompt, tokens) in enumerate(answers):
        has_picture = IMAGE in turns(number)[0][1]
        ids = reference.prompt_ids(turns(number), [SIZES[number]] if has_picture else [])
        assert prompt == [max(0, token) for token in ids]
        made = reference.generate(ids, [picture(number)] if has_picture else [], TOKENS)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)


@pytest.mark.parametrize("chunk", [16, 300])
async def test_partial_lora_in_pieces_of_prompts(folder: Path, short_tmp: Path, chunk: int) -> None:
    """Four at once: some rows of a step take a picture's rows, others text."""
    reference, store = wemm.Wemm(folder), ArtifactStore(short_tmp / "artifacts", "producer", "")
    texts, asked = [], []
    for number in range(4):
        shown = [picture(number)] if number % 4 else []
        ids = reference.prompt_ids(turns(number), [image.size for image in shown])
        places = [place for place, token in enumerate(ids) if token < 0]
        media = [
            MediaItem(
                digest=f"image-{number}".encode().ljust(16, b"-"),
                modality=Modality.MODALITY_IMAGE,
                offset=places[0],
                length=len(places),
                rows=len(places),
            )
            for _ in shown
        ]
        texts.append(Text(number, [max(0, token) for token in ids], greedy(), media=media))
        asked.append((ids, shown))
    limits = {"max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 64 << 20}
    async with (
        running_decoder(folder, short_tmp / "s", max_model_len=2048, **limits) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        plan = make_plan()
        for text, (_, shown) in zip(texts, asked, strict=True):
            for item, image in zip(text.media, shown, strict=True):
                rows = reference.embed_image(image).numpy()
                plan.fetch.append(store.put(bytes(item.digest), rows, "float32"))
        await stream.run(plan)
        while len(stream.ready) < len(plan.fetch):
            await stream.next_message()
        await NaiveScheduler(stream).generate(texts, TOKENS, chunk=chunk)
    for text, (ids, shown) in zip(texts, asked, strict=True):
        made = reference.generate(ids, shown, TOKENS)
        assert_same_up_to_ties(text.output, made.tokens, made.logits)


def test_every_tensor_is_read_by_one_service(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    decoder, encoder = names_read(folder, load_decoder), names_read(folder, load_tower)
    assert not decoder & encoder
    assert decoder | encoder == set(checkpoint.names())


def load_tower(checkpoint: Checkpoint) -> object:
    return WeMMEncoder(checkpoint, CpuDevice(torch.float32))


def test_only_the_top_level_says_whether_pictures_are_cut(tmp_path: Path) -> None:
    """And the model's own chat format goes before a folder's."""
    folder = wemm.write_checkpoint(tmp_path / "wemm", stock=True)
    path = folder / "preprocessor_config.json"
    write_json(path, {**read_json(path), "do_image_splitting": True})
    (folder / "chat_template.jinja").write_text("{% for message in messages %}?{% endfor %}")
    checkpoint = require_servable(folder)
    assert registry.find(checkpoint).processor_config(checkpoint)["do_image_splitting"] is False
    assert "<|im_start|>" in str(find_template(checkpoint))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_image_splitting": True}, "do_image_splitting is not served"),
        ({"image_processor": {"size": {"height": 4, "width": 4}}}, "no shortest_edge"),
    ],
)
def test_other_pictures_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = wemm.write_checkpoint(tmp_path / "wemm")
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})
    checkpoint = Checkpoint(folder)
    with pytest.raises(InvalidRequest, match=message):
        registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
