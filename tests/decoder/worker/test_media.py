"""Embeddings of images: fetched in the background, put where the prompt says, refused if unlike."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.decoder.media.embeddings import Embeddings
from shared.artifacts.store import ArtifactReader, ArtifactStore
from shared.errors import Precondition
from tessera.artifact.v1.artifact_pb2 import ArtifactLocation, ArtifactRef
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.decoder.step_stream import (
    Decoder,
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    running_decoder,
)

ROWS, HIDDEN = 16, 64
DIGEST = b"image-1".ljust(16, b"-")
PLACEHOLDER = -7  # far outside the vocabulary


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(params=["cpu", "deferred"])
async def decoder(
    llava_folder: Path, short_tmp: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Decoder]:
    async with running_decoder(llava_folder, short_tmp / "s", LOADS[request.param]) as running:
        yield running


@pytest.fixture
def store(short_tmp: Path) -> ArtifactStore:
    return ArtifactStore(short_tmp / "artifacts", "producer", "")


def embedding(rows: int = ROWS, seed: int = 0) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(seed).standard_normal((rows, HIDDEN)).astype(np.float32)


def image(offset: int, digest: bytes = DIGEST, **changes: Any) -> MediaItem:
    values = {"digest": digest, "modality": 1, "offset": offset, "length": ROWS, "rows": ROWS}
    return MediaItem(**{**values, **changes})


async def fetched(stream: StepStream, *refs: ArtifactRef) -> tuple[list[bytes], list[bytes]]:
    """Asks for artifacts and waits, without further plans, until the decoder has told of each."""
    stream.ready.clear()
    stream.lost.clear()
    await stream.run(make_plan(fetch=list(refs)))
    while len(stream.ready) + len(stream.lost) < len(refs):
        await stream.next_message()
    return stream.ready, stream.lost


def reference_tokens(
    folder: Path, prompt: list[int], spans: list[tuple[int, "np.ndarray[Any, Any]"]], count: int
) -> tuple[list[int], torch.Tensor]:
    model = load_reference(folder)
    ids = torch.tensor([token if 0 <= token < 400 else 0 for token in prompt])
    embeds = model.get_input_embeddings()(ids).detach().clone()
    for first, rows in spans:
        embeds[first : first + len(rows)] = torch.from_numpy(rows)
    return greedy_tokens(model, prompt, count, embeds)


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"language": "qwen2", "tower": "siglip", "spelling": "old"},
        {"spelling": "new", "shard_bytes": 20_000, "text": {"tie_word_embeddings": True}},
    ],
)
async def test_images_in_a_prompt(
    tmp_path: Path, short_tmp: Path, store: ArtifactStore, chunk: int, options: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, "llava", **options)
    first, second = embedding(), embedding(seed=1)
    other = b"image-2".ljust(16, b"-")
    refs = [store.put(DIGEST, first), store.put(other, second)]
    words = list(range(40, 60))
    prompt = [*words[:5], *[PLACEHOLDER] * ROWS, *words[5:9], *[10**6] * ROWS, *words[9:]]
    media = [image(5), image(25, other)]
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        assert set((await fetched(stream, *refs))[0]) == {DIGEST, other}
        texts = [Text(0, prompt, greedy(), media=media), Text(1, words, greedy())]
        await NaiveScheduler(stream).generate(texts, 8, chunk)
    spans = [(5, first), (25, second)]
    for text, where in zip(texts, (spans, []), strict=True):
        expected, logits = reference_tokens(folder, list(text.prompt), where, 8)
        assert_same_up_to_ties(text.output, expected, logits)


async def test_rows_go_to_their_runs(
    decoder: Decoder, llava_folder: Path, store: ArtifactStore
) -> None:
    """Separators inside a span keep their own embeddings."""
    rows = embedding(6)
    prompt = [40, 41, PLACEHOLDER, PLACEHOLDER, 50, *[PLACEHOLDER] * 4, 51, 42, 43]
    runs = [EmbedRun(start=0, length=2), EmbedRun(start=3, length=4)]
    item = image(2, length=8, rows=6, embed_runs=runs)
    async with StepStream.open(decoder.address) as stream:
        await fetched(stream, store.put(DIGEST, rows))
        text = Text(0, prompt, greedy(), media=[item])
        await NaiveScheduler(stream).generate([text], 6, chunk=4)
    expected, logits = reference_tokens(llava_folder, prompt, [(2, rows[:2]), (5, rows[2:])], 6)
    assert_same_up_to_ties(text.output, expected, logits)


async def test_bfloat16_embeddings_are_understood(
    decoder: Decoder, llava_folder: Path, store: ArtifactStore
) -> None:
    rows = torch.from_numpy(embedding()).bfloat16()
    ref = store.put(DIGEST, rows.view(torch.uint16).numpy(), dtype="bfloat16")
    prompt = [40, *[PLACEHOLDER] * ROWS, 41]
    async with StepStream.open(decoder.address) as stream:
        await fetched(stream, ref)
        text = Text(0, prompt, greedy(), media=[image(1)])
        await NaiveScheduler(stream).generate([text], 5)
    expected, logits = reference_tokens(llava_folder, prompt, [(1, rows.float().numpy())], 5)
    assert_same_up_to_ties(text.output, expected, logits)


async def test_a_span_without_its_embedding_fails_its_row_alone(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        scheduler = NaiveScheduler(stream)
        texts = [
            Text(0, [40, *[PLACEHOLDER] * ROWS, 41], greedy(), media=[image(1)]),
            Text(1, [40, 41], greedy()),
        ]
        result = await scheduler.step(texts, 64)
        assert [(f.row, f.failure.reason) for f in result.failed] == [(0, "MEDIA_NOT_READY")]
        assert texts[1].output[0] >= 0
        # The text before a span may be computed while its image is away.
        await stream.run(make_plan(drop=[0, 1]))
        early = Text(2, [40, 41, *[PLACEHOLDER] * ROWS, 41], greedy(), media=[image(2)])
        result = await scheduler.step([early], 2)
        assert not result.failed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": ROWS - 1}, "MEDIA_MISMATCH"),
        ({"length": 12, "rows": 12}, "MEDIA_MISMATCH"),  # the artifact has 16
        ({"offset": 90}, "INVALID_MEDIA"),
        ({"modality": 9}, "UNKNOWN_MODALITY"),
        ({"length": 0, "rows": 0}, "INVALID_MEDIA"),
        ({"embed_runs": [EmbedRun(start=15, length=2)], "rows": 2}, "INVALID_MEDIA"),
        ({"embed_runs": [EmbedRun(start=4, length=2), EmbedRun(start=5, length=1)], "rows": 3},
         "INVALID_MEDIA"),
        ({"offset": 2}, "INVALID_TOKEN"),  # a placeholder that nothing replaces
    ],
)  # fmt: skip
async def test_spans_unlike_their_promise(
    decoder: Decoder, store: ArtifactStore, changes: dict[str, Any], reason: str
) -> None:
    changes = {"digest": DIGEST, "offset": 1, **changes}
    filler = 5 if changes.get("length") == 12 else PLACEHOLDER
    prompt = [40, *[PLACEHOLDER] * 12, *[filler] * 4, 41, 42]
    async with StepStream.open(decoder.address) as stream:
        await fetched(stream, store.put(DIGEST, embedding()))
        text = Text(0, prompt, greedy(), media=[image(**changes)])
        result = await NaiveScheduler(stream).step([text], 64)
    assert [f.failure.reason for f in result.failed] == [reason]


@pytest.mark.parametrize("array", [np.zeros((ROWS, HIDDEN + 1), np.float32),
                                   np.zeros((ROWS, HIDDEN), np.uint8)])  # fmt: skip
async def test_artifacts_of_another_kind(
    decoder: Decoder, store: ArtifactStore, array: "np.ndarray[Any, Any]"
) -> None:
    async with StepStream.open(decoder.address) as stream:
        await fetched(stream, store.put(DIGEST, array))
        text = Text(0, [40, *[PLACEHOLDER] * ROWS, 41], greedy(), media=[image(1)])
        result = await NaiveScheduler(stream).step([text], 64)
    assert [f.failure.reason for f in result.failed] == ["MEDIA_MISMATCH"]


async def test_what_was_wrong_with_an_artifact_is_forgotten_with_it(store: ArtifactStore) -> None:
    embeddings = Embeddings(ArtifactReader(), lambda tensor: tensor.float(), 0)
    arrived = asyncio.Event()
    embeddings.listen(arrived.set)

    def reason() -> str:
        with pytest.raises(Precondition) as refused:
            embeddings.rows(DIGEST, 0, 1, ROWS, HIDDEN)
        return refused.value.reason

    embeddings.start(store.put(DIGEST, np.zeros((ROWS, HIDDEN), np.int32)))
    embeddings.hold([DIGEST])
    await asyncio.wait_for(arrived.wait(), 60)
    assert reason() == "MEDIA_MISMATCH"
    embeddings.use([DIGEST])
    embeddings.release([DIGEST])
    assert reason() == "MEDIA_MISMATCH", "a sequence that needs it is still to hear of it"
    embeddings.unuse([DIGEST])
    assert reason() == "MEDIA_NOT_READY"
    await embeddings.close()


async def test_what_cannot_be_had_is_reported_lost(decoder: Decoder, store: ArtifactStore) -> None:
    gone = store.put(DIGEST, embedding())
    store.evict(DIGEST)
    nowhere = ArtifactRef(
        digest=b"x" * 16, dtype="float32", shape=[1, HIDDEN], size_bytes=4 * HIDDEN,
        location=ArtifactLocation(address="unix:/nowhere"),
    )  # fmt: skip
    async with StepStream.open(decoder.address) as stream:
        ready, lost = await fetched(stream, gone, nowhere)
        assert not ready and sorted(lost) == sorted([DIGEST, b"x" * 16])
        # Made again, it is fetched again.
        assert (await fetched(stream, store.put(DIGEST, embedding())))[0] == [DIGEST]


async def test_embeddings_are_held_until_released_and_then_while_there_is_room(
    llava_folder: Path, short_tmp: Path, store: ArtifactStore
) -> None:
    size = embedding().nbytes
    digests = [bytes([i]) * 16 for i in range(4)]
    async with (
        running_decoder(llava_folder, short_tmp / "s", embedding_cache_bytes=2 * size) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        cache = decoder.loaded.worker.embeddings
        await fetched(stream, *(store.put(digest, embedding()) for digest in digests))
        assert len(cache._tensors) == 4  # all are waited for
        await stream.run(make_plan(release=digests[:1]))
        assert set(cache._tensors) == set(digests[1:])
        text = Text(0, [*[PLACEHOLDER] * ROWS, 41], greedy(), media=[image(0, digests[1])])
        await NaiveScheduler(stream).step([text], 4)
        await stream.run(make_plan(release=digests[1:]))
        assert set(cache._tensors) >= {digests[1]} and len(cache._tensors) == 2  # in use
        assert not (await NaiveScheduler(stream).step([text], 4)).failed
        await stream.run(make_plan(drop=[0]))
        assert len(cache._tensors) == 2
        # Still here: ready without the producer.
        store.close()
        left = list(cache._tensors)[-1]
        assert (await fetched(stream, ArtifactRef(digest=left)))[0] == [left]
