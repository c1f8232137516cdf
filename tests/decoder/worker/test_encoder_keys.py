"""Layers that attend to pictures: the tokens of transformers' `generate`, whatever plans do with sequences, and what is
kept of pictures is written once and shared."""

from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.vision_encoder.devices.cpu.device import CpuDevice as EncoderCpu
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Item, to_array
from shared.artifacts.small_tensor import small_tensor
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import run_processor
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem, Modality
from tests.support.checkpoints import generic, load_reference, make_checkpoint
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import (
    Decoder,
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    introduce,
    make_plan,
    read_floats,
    read_ints,
    running_decoder,
)
from tests.support.preprocess.service import picture

MARKER = "<|image|>"
NEW_TOKENS = 6
ROWS = 20  # of a picture: 4 tiles of 4 patches and a class token
SMALL, WIDE, TALL, LARGE = (20, 20), (60, 25), (25, 60), (60, 60)  # 1, 2, 2 and 4 tiles
# Words with a {} for each picture, and the pictures' sizes.
PROMPTS: list[tuple[str, list[tuple[int, int]]]] = [
    ("what {} is it?", [SMALL]),
    ("no picture at all is here", []),
    ("{} first, then words", [WIDE]),
    ("one {} and, farther on, another {} with words", [TALL, SMALL]),
    ("both {}{} side by side, then {} alone", [SMALL, WIDE, LARGE]),
]


class Pictures:
    """Prompts of one checkpoint with the rows of their pictures, and what transformers makes of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processor: Any = generic.processor(folder)
        self._encoder: Any = load_encoder(Checkpoint(folder), EncoderCpu(torch.float32))
        self.rows: dict[bytes, Any] = {}

    @cached_property
    def _model(self) -> Any:
        return load_reference(self._folder)

    def text(self, slot: int, number: int, seed: int = 0) -> Text:
        """Prompt `number` of PROMPTS."""
        _, sizes = PROMPTS[number]
        inputs = self._inputs(number, seed)
        ids = inputs["input_ids"][0].numpy()
        places = np.flatnonzero(ids == self._processor.image_token_id).tolist()
        shown = self._shown(sizes, seed)
        media = [self._item(*one, place) for one, place in zip(shown, places, strict=True)]
        return Text(slot, ids.tolist(), greedy(), media=media)

    def expected(self, number: int, count: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
        """Tokens by `generate`, and their logits."""
        inputs = self._inputs(number, seed)
        with torch.no_grad():
            output = self._model.generate(
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_scores=True,
            )
        length = inputs["input_ids"].shape[1]
        return output.sequences[0, length:].tolist(), torch.cat(output.scores)

    def _inputs(self, number: int, seed: int) -> dict[str, torch.Tensor]:
        words, sizes = PROMPTS[number]
        shown = [one for one, _ in self._shown(sizes, seed)]
        return generic.inputs(self._folder, words.format(*[MARKER] * len(sizes)), shown)

    def _shown(self, sizes: Sequence[tuple[int, int]], seed: int) -> list[tuple[Any, bytes]]:
        found = []
        for size in sizes:
            digest = f"{size}-{seed}".encode().ljust(16, b"-")
            found.append((picture(*size, seed=seed), digest))
        return found

    def _item(self, shown: Any, digest: bytes, place: int) -> MediaItem:
        tensors = generic.item_tensors(
            self._folder, run_processor(self._processor, [shown], MARKER)
        )
        if digest not in self.rows:
            [rows] = self._encoder.encode([Item(tensors)])
            self.rows[digest] = to_array(rows)[0]
        return MediaItem(
            digest=digest,
            modality=Modality.MODALITY_IMAGE,
            offset=place,
            length=1,
            rows=len(self.rows[digest]),
            fields={"aspect_ratio_mask": small_tensor(tensors["aspect_ratio_mask"])},
        )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return Pictures(make_checkpoint(tmp_path_factory.mktemp("mllama"), "mllama"))


@pytest.fixture(params=LOADS)
async def decoder(
    pictures: Pictures, short_tmp: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Decoder]:
    options = {"load": LOADS[request.param], "max_num_seqs": 6, "max_model_len": 128}
    options["skip_model_check"] = True  # tests/comparison compares it
    async with running_decoder(pictures._folder, short_tmp / "s", **options) as running:
        yield running


@pytest.fixture
async def stream(
    decoder: Decoder, pictures: Pictures, short_tmp: Path
) -> AsyncIterator["PictureStream"]:
    async with StepStream.open(decoder.address) as opened:
        store = ArtifactStore(short_tmp / "artifacts", "producer", "")
        yield PictureStream(opened, pictures, store)


class PictureStream:
    """Sends texts whose pictures the decoder has."""

    def __init__(self, stream: StepStream, pictures: Pictures, store: ArtifactStore) -> None:
        self.stream, self.pictures, self._store = stream, pictures, store
        self._fetched: set[bytes] = set()

    async def text(self, slot: int, number: int, seed: int = 0) -> Text:
        """A prompt whose pictures have arrived."""
        text = self.pictures.text(slot, number, seed)
        new = {bytes(item.digest) for item in text.media} - self._fetched
        refs = [self._store.put(digest, self.pictures.rows[digest]) for digest in new]
        if refs:
            await self.stream.run(make_plan(fetch=refs))
            while not new <= set(self.stream.ready):
                await self.stream.next_message()
        self._fetched |= new
        return text

    def assert_right(self, text: Text, number: int, seed: int = 0) -> None:
        """Its output is that of `generate`."""
        expected = self.pictures.expected(number, len(text.output), seed)
        assert_same_up_to_ties(text.output, *expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
async def test_tokens_are_those_of_generate_beside_texts_without_pictures(
    stream: PictureStream, chunk: int
) -> None:
    texts = [await stream.text(slot, slot) for slot in range(len(PROMPTS))]
    scheduler = NaiveScheduler(stream.stream)
    await scheduler.generate(texts[:3], 2, chunk)
    await scheduler.generate(texts, NEW_TOKENS, chunk)
    for number, text in enumerate(texts):
        stream.assert_right(text, number)


async def test_bits_depend_on_nothing_else_in_the_batch(stream: PictureStream) -> None:
    scheduler = NaiveScheduler(stream.stream)
    wanted = greedy(logprobs=1)

    async def scores(slot: int, beside: list[Text], chunk: int) -> list[float]:
        text, found = await stream.text(slot, 4), list[float]()
        text.sampling = wanted
        while len(text.output) < 3:
            result = await scheduler.step([text, *beside], chunk)
            assert not result.failed, result.failed
            found += read_floats(result.logprobs)[: len(text.output) - len(found)]
        return found

    alone = await scores(0, [], 64)
    others = [await stream.text(2 + number, number) for number in range(3)]
    assert await scores(1, others, 5) == alone and len(alone) == 3


async def test_pictures_matter(stream: PictureStream) -> None:
    """Else the tests here would show nothing."""
    _, one = stream.pictures.expected(0, 1)
    _, other = stream.pictures.expected(0, 1, seed=1)
    assert float((one - other).abs().max()) > 0.05 * float(one.std())


async def test_an_answer_goes_on_in_another_slot_from_its_first_token(
    stream: PictureStream,
) -> None:
    text = await stream.text(0, 3)
    scheduler = NaiveScheduler(stream.stream)
    await scheduler.generate([text], 3)
    resumed = await stream.text(4, 3)
    resumed.output = list(text.output)
    await scheduler.generate([resumed], NEW_TOKENS)
    stream.assert_right(resumed, 3)


async def test_a_fork_attends_to_the_pictures_of_a_sequence_that_is_gone(
    stream: PictureStream,
) -> None:
    text = await stream.text(0, 2)
    scheduler = NaiveScheduler(stream.stream)
    await scheduler.generate([text], 2)
    child = Text(1, text.prompt, greedy(), 1, text.media, list(text.output), known=True)
    child.computed = text.computed
    plan = {"fork_child": [1], "fork_parent": [0], "fork_choice": [1]}
    copies = [scheduler.free.pop() for _ in text.blocks]
    plan |= {"edit_slot": [1], "edit_index": [0], "edit_len": [len(copies)], "edit_blocks": copies}
    child.blocks = copies
    await stream.stream.run(make_plan(**plan, copy_src=text.blocks, copy_dst=copies))
    await stream.stream.run(make_plan(drop=[0]))
    # What the pool has left is overwritten by others.
    others = [await stream.text(2 + slot, 2, seed=1 + slot) for slot in range(3)]
    await scheduler.generate([child, *others], NEW_TOKENS)
    for seed, one in enumerate([child, *others]):
        stream.assert_right(one, 2, seed)


async def test_blocks_of_dropped_sequences_are_free_and_no_more_than_all_are_given_out(
    stream: PictureStream,
) -> None:
    hello = stream.stream.hello
    assert hello.encoder_blocks == 6 * -(-ROWS // hello.block_size)
    scheduler = NaiveScheduler(stream.stream)
    for seed in range(8):
        text = await stream.text(0, 0, seed)
        await scheduler.generate([text], 2)
        stream.assert_right(text, 0, seed)
        await stream.stream.run(make_plan(drop=[0]))
        scheduler.free += text.blocks
    # Of three pictures each: 4 blocks.
    texts = [await stream.text(slot, 4, seed=10 + slot) for slot in range(4)]
    result = await scheduler.step(texts, 64)
    assert [failed.failure.reason for failed in result.failed] == ["TOO_MUCH_MEDIA"]


async def test_keys_are_written_once_for_all_sequences_with_the_same_pictures(
    decoder: Decoder, stream: PictureStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder.loaded.worker._model
    inner, written = model.forward, list[int]()

    def forward(hidden: torch.Tensor, step: Any, caches: Any) -> torch.Tensor:
        found = inner(hidden, step, caches)
        written.append(0 if step.attending is None else len(step.attending.new))
        if len(written) == 1:  # behind all layers: the step is computed again
            raise torch.OutOfMemoryError("there is none left")
        return found

    texts = [await stream.text(slot, 3) for slot in range(2)]
    monkeypatch.setattr(model, "forward", forward)
    scheduler = NaiveScheduler(stream.stream)
    await scheduler.generate(texts, 2)
    # Preempted: its blocks are other ones, and it is computed again in its slot.
    texts[0].computed, texts[0].blocks = 0, []
    await scheduler.generate(texts, NEW_TOKENS)
    assert written[:2] == [2, 2] and not any(written[2:])
    for text in texts:
        stream.assert_right(text, 3)


async def test_pictures_that_are_not_there_fail_their_sequence_alone(stream: PictureStream) -> None:
    there = await stream.text(0, 0)
    away = stream.pictures.text(1, 2, seed=77)
    scheduler = NaiveScheduler(stream.stream)
    result = await scheduler.step([there, away], 64)
    assert [failed.row for failed in result.failed] == [1]
    there.output = read_ints(result.tokens)[:1]
    stream.assert_right(there, 0)


async def test_media_of_another_form_are_refused(stream: PictureStream) -> None:
    text = await stream.text(0, 0)
    item = MediaItem()
    item.CopyFrom(text.media[0])
    item.rows = 7
    plan = {"edit_slot": [0], "edit_index": [0], "edit_len": [1], "edit_blocks": [1]}
    new = introduce(text, media=[item])
    rows = {"row_slot": [0], "row_start": [0], "row_count": [len(text.prompt)]}
    result = await stream.stream.run(make_plan(new=[new], **plan, **rows))
    assert [failed.failure.reason for failed in result.failed] == ["INVALID_MEDIA"]


def test_memory_is_divided_among_blocks_and_keys_of_pictures(pictures: Pictures) -> None:
    def limits(**changes: Any) -> Any:
        given = {"model": pictures._folder, "device": "cpu", "threads": 1, "max_num_seqs": 4}
        given |= {"max_model_len": 128, "skip_model_check": True, **changes}
        return load(DecoderSettings.model_validate(given)).worker.limits

    of_block = 16 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, size, bytes: in one layer
    most = limits()
    assert (most.num_blocks, most.num_encoder_blocks) == (4 * 8 + 1, 4 * 2)
    # Two of five layers have keys of pictures; the longest text takes 8 blocks and one of padding.
    few = limits(kv_cache_memory_bytes=9 * 3 * of_block + 5 * 2 * of_block)
    assert (few.num_blocks, few.num_encoder_blocks) == (9, 4)
    with pytest.raises(InvalidRequest, match="--kv-cache-memory-bytes") as refused:
        limits(kv_cache_memory_bytes=2 * 2 * of_block)
    assert refused.value.reason == "KV_CACHE_TOO_SMALL"
