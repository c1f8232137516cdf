"""Qwen-VL against the reference implementation: pixel values, rows, prompts and tokens; what is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from services.families import registry
from services.families.family import ItemSize
from services.preprocess.media.processor_config import read_processor_config
from services.preprocess.prompt.tokenizer import PromptTokenizer
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import pixel_item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_class, image_processor_name
from shared.errors import InvalidRequest
from shared.text.guard import GUARD
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality
from tests.reference_models.common import noise
from tests.reference_models.qwen_vl import QwenVL, write_checkpoint
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
from tests.support.family_parts import rule_of
from tests.support.vision_encoder import tower_engine

TALK = [("user", "<image>and <image>What?"), ("assistant", "Dogs."), ("user", "<image>And this?")]
PICTURES = [noise(50, 70, 1), noise(64, 64, 2), noise(200, 30, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen-vl"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> QwenVL:
    return QwenVL(folder)


@pytest.mark.parametrize("engine", tower_engine.ENGINES)
def test_pixels_and_rows(
    folder: Path, reference: QwenVL, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower_engine.choose(engine, monkeypatch)
    settings = read_processor_config(folder)
    processor = image_processor_class(image_processor_name(settings)).from_dict(settings)
    items = []
    for picture in PICTURES:
        made = processor(images=picture, return_tensors="np")["pixel_values"][0]
        torch.testing.assert_close(torch.from_numpy(made), reference.pixel_values(picture))
        items.append(pixel_item(np.asarray(made, np.float32)))
    encoder = load_encoder(Checkpoint(folder), CpuDevice(torch.float32))
    assert encoder is not None
    together = encoder.encode(items)
    for item, rows, picture in zip(items, together, PICTURES, strict=True):
        expected = reference.embed_image(picture)
        # Sums of float32 in another order than the reference, whose patches are a convolution; rows reach 11.
        close = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=close)
        if engine == "kernels":
            assert torch.equal(encoder.encode([item])[0], rows)
    size = registry.find(Checkpoint(folder)).largest(Checkpoint(folder), Modality.MODALITY_IMAGE)
    span = rule_of(folder).span(size)
    assert len(span.token_ids) == size.tokens and span.rows == len(together[0])
    assert len(encoder.encode([encoder.sample(size)])[0]) == span.rows


@pytest.mark.parametrize("chunk", [16, 300])
async def test_tokens_of_prompts_with_pictures(
    folder: Path, reference: QwenVL, short_tmp: Path, chunk: int
) -> None:
    """Eight at once, with no picture to three."""
    store = ArtifactStore(short_tmp / "artifacts", "producer", "")
    digests = [f"image-{i}".encode().ljust(16, b"-") for i in range(len(PICTURES))]
    rows = [reference.embed_image(picture) for picture in PICTURES]
    span = rule_of(folder).span(ItemSize(64, 64))
    texts, asked = [], []
    for slot in range(8):
        turns = [TALK[-1:], TALK, [("user", f"Number {slot}?")]][slot % 3]
        shown = [slot % 3] if slot % 3 == 0 else [0, 1, 2][: 3 * (slot % 3 == 1)]
        ids = reference.prompt_ids(turns, [PICTURES[i].size for i in shown])
        starts = [place for place, token in enumerate(ids) if token == span.token_ids[0]]
        media = [
            MediaItem(
                digest=digests[i], modality=Modality.MODALITY_IMAGE, offset=start, rows=span.rows,
                length=len(span.token_ids),
                embed_runs=[EmbedRun(start=first, length=count) for first, count in span.embed_runs],
            )
            for i, start in zip(shown, starts, strict=True)
        ]  # fmt: skip
        for start in starts:
            assert tuple(ids[start : start + len(span.token_ids)]) == span.token_ids
        texts.append(Text(slot, ids, greedy(), media=media))
        asked.append([PICTURES[i] for i in shown])
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
        await NaiveScheduler(stream).generate(texts, 6, chunk)
    for text, pictures in zip(texts[:4], asked, strict=False):
        expected = reference.generate(list(text.prompt), pictures, 6)
        assert_same_up_to_ties(text.output, expected.tokens, expected.logits)


def test_the_chat_format_numbers_pictures_anew_in_each_message(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"chat_format": "chatml"}))
    checkpoint = Checkpoint(folder)
    source = registry.find(checkpoint).chat_template(checkpoint)
    assert source is not None
    template = chat_template(source.replace(GUARD, ""), {})
    assert all(template.takes_parts.values()) and template.renders_media("image", "<img>")
    image, text = {"type": "image"}, {"type": "text", "text": "What?"}
    turns = [
        {"role": "user", "content": [image, image, text]},
        {"role": "assistant", "content": [{"type": "text", "text": "Dogs."}]},
        {"role": "user", "content": [image, text]},
    ]
    expected = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "Picture 1: <img></img>\nPicture 2: <img></img>\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\nDogs.<|im_end|>\n"
        "<|im_start|>user\nPicture 1: <img></img>\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(turns, True) == expected
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    own = expected.replace("You are a helpful assistant.", "Be brief.")
    assert template.render([system, *turns], True) == own


def test_a_text_is_encoded_apart_from_what_is_before_it(folder: Path, reference: QwenVL) -> None:
    """Line breaks at its beginning do not join that behind the role."""
    (folder / "generation_config.json").write_text(json.dumps({"chat_format": "chatml"}))
    source = registry.find(Checkpoint(folder)).chat_template(Checkpoint(folder))
    assert source is not None
    turns = [
        ("system", "\nBe brief."),
        ("user", "\n\nWhat is it?"),
        ("assistant", " \n\nDogs."),
        ("user", ""),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    text = chat_template(source, {}).render(messages, True)
    assert PromptTokenizer(folder).encode(text, True).tolist() == reference.prompt_ids(turns, [])


def test_the_first_releases_keys_are_read(folder: Path, tmp_path: Path) -> None:
    (config, same) = (json.loads((folder / "config.json").read_text()) for _ in range(2))
    for first, later in {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "padded_vocab_size": "vocab_size",
    }.items():
        config[first] = config.pop(later)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert config.keys() != same.keys()
    read = registry.decoder_config(Checkpoint(tmp_path))
    assert read == registry.decoder_config(Checkpoint(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_pct": 0.5}, "rotary_pct"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_another_block_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        registry.decoder_config(Checkpoint(write_checkpoint(tmp_path, text=changes)))


async def test_lengths_beyond_the_trained_one_are_refused(tmp_path: Path, short_tmp: Path) -> None:
    folder = write_checkpoint(tmp_path, text={"use_logn_attn": True, "seq_length": 512})
    with pytest.raises(InvalidRequest, match="use_logn_attn"):
        async with running_decoder(folder, short_tmp / "s", max_model_len=1024):
            pass


def test_other_chat_formats_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path))
    family = registry.find(checkpoint)
    (tmp_path / "generation_config.json").write_text(json.dumps({"chat_format": "raw"}))
    assert family.chat_template(Checkpoint(tmp_path)) is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"chat_format": "alpaca"}))
    with pytest.raises(InvalidRequest, match="alpaca"):
        family.chat_template(Checkpoint(tmp_path))
