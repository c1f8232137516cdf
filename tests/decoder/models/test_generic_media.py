"""Decoders of models whose prompt and encoder are transformers' code, over its rows: the tokens of `generate`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.media.media_spans import contiguous_runs
from services.decoder.models.generic.decoder import GenericDecoder
from services.families import registry
from services.vision_encoder.devices.cpu.device import CpuDevice as EncoderCpu
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Item, to_array
from shared.artifacts.small_tensor import small_tensor
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import run_processor
from shared.model_backends import ModelBackend
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality
from tests.support.checkpoints import GENERIC, generic, load_reference, make_checkpoint
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
from tests.support.preprocess.service import picture

NEW_TOKENS = 8
SIZES = [[(100, 70)], [(31, 64), (48, 48)], []]  # of the pictures of each prompt
NATIVE = ("idefics3", "llava_onevision")  # with a decoder of ours
BY_US_ALONE = ("mllama",)  # tests/decoder/worker/test_encoder_keys.py
WHOLE_SPANS = ("gemma3", "molmo2")  # the tokens of a picture see each other


class Prepared:
    """A checkpoint, prompts for it with the embeddings of their pictures, and what transformers makes of them."""

    def __init__(self, folder: Path, store: ArtifactStore) -> None:
        self._folder = folder
        self._processor: Any = generic.processor(folder)
        self._encoder = load_encoder(Checkpoint(folder), EncoderCpu(torch.float32))
        self._model: Any = load_reference(folder)
        self._store = store
        self.refs: list[ArtifactRef] = []

    def text(self, slot: int, sizes: list[tuple[int, int]]) -> Text:
        """A prompt with pictures of these sizes between words."""
        marker = self._processor.image_token
        words = f"{slot} " + "".join(f"what {marker} and then " for _ in sizes) + "is it?"
        pictures = [picture(*size, seed=10 * slot + i) for i, size in enumerate(sizes)]
        self._inputs = generic.inputs(self._folder, words, pictures)
        ids = self._inputs["input_ids"][0].numpy()
        places = np.flatnonzero(np.isin(ids, generic.row_ids(self._folder)))
        media = []
        for number, one in enumerate(pictures):
            made = run_processor(self._processor, [one], marker)
            tensors = generic.item_tensors(self._folder, made)
            [rows] = self._encoder.encode([Item(tensors)])  # type: ignore[union-attr]
            digest = f"{slot}-{number}".encode().ljust(16, b"-")
            self.refs.append(self._store.put(digest, to_array(rows)[0]))
            own, places = places[: len(rows)], places[len(rows) :]
            media.append(_item(digest, own, tensors))
        return Text(slot, ids.tolist(), greedy(), media=media)

    def expected(self) -> tuple[list[int], torch.Tensor]:
        """Tokens of the last text by `generate`, and their logits."""
        with torch.no_grad():
            output = self._model.generate(
                **self._inputs,
                attention_mask=torch.ones_like(self._inputs["input_ids"]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_scores=True,
            )
        length = self._inputs["input_ids"].shape[1]
        return output.sequences[0, length:].tolist(), torch.cat(output.scores)


def _item(digest: bytes, places: "np.ndarray[Any, Any]", tensors: Any) -> MediaItem:
    runs = contiguous_runs(places - places[0])
    small = {name: values for name, values in tensors.items() if values.size <= 8}
    return MediaItem(
        digest=digest,
        modality=Modality.MODALITY_IMAGE,
        offset=int(places[0]),
        length=int(places[-1] - places[0] + 1),
        embed_runs=[EmbedRun(start=start, length=count) for start, count in runs],
        rows=len(places),
        fields={name: small_tensor(values) for name, values in small.items()},
    )


CASES = [
    *((family, "auto", 64) for family in NATIVE),
    *((family, "transformers", 512) for family in GENERIC if family not in BY_US_ALONE),
    *(
        (family, "transformers", 7)
        for family in GENERIC
        if family not in (*WHOLE_SPANS, *BY_US_ALONE)
    ),
]
# One that computes a picture's tokens whole, and one that does not.
BY_DEFAULT = [
    ("ovis2", "transformers", 7),
    ("gemma3", "transformers", 512),
]

COMPARED = ("ovis2", 7)


@pytest.mark.parametrize(
    ("family", "backend", "chunk"),
    [pytest.param(*case, marks=[] if case in BY_DEFAULT else pytest.mark.full) for case in CASES],
)
async def test_prompts_with_images_alone_and_together(
    family: str, backend: str, chunk: int, tmp_path: Path, short_tmp: Path
) -> None:
    folder = make_checkpoint(tmp_path, family)
    prepared = Prepared(folder, ArtifactStore(short_tmp / "artifacts", "producer", ""))
    texts, references = [], []
    for slot, sizes in enumerate(SIZES):
        texts.append(prepared.text(slot, sizes[: generic.MOST_IMAGES.get(family)]))
        references.append(prepared.expected())
    if (family, chunk) != COMPARED:
        take_as_compared(folder, ModelBackend(backend))
    settings = {"model_backend": backend, "max_num_batched_tokens": 1024}
    async with (
        running_decoder(folder, short_tmp / "s", **settings) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        is_generic = isinstance(decoder.loaded.worker._model, GenericDecoder)
        assert is_generic == (backend == "transformers" or family not in NATIVE)
        await stream.run(make_plan(fetch=prepared.refs))
        while len(stream.ready) < len(prepared.refs):
            await stream.next_message()
        scheduler = NaiveScheduler(stream)
        alone = Text(9, texts[1].prompt, greedy(), media=texts[1].media)
        await scheduler.generate([alone], NEW_TOKENS, chunk)
        await scheduler.generate(texts, NEW_TOKENS, chunk)
    for text, (expected, logits) in zip(texts, references, strict=True):
        assert_same_up_to_ties(text.output, expected, logits)
    assert alone.output == texts[1].output


def test_a_record_may_have_rows_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, "gemma3"))
    ids, rows = torch.tensor([40, 41, 42, 43]), torch.ones(2, 64)

    def embedded() -> torch.Tensor:
        decoder = GenericDecoder.load(checkpoint, CpuDevice(torch.float32).ops, 128)
        return decoder.embed(ids, [rows], [(1, 2)])

    replaced = embedded()
    own = generic.with_overrides("Gemma3ForConditionalGeneration", merge="add")
    monkeypatch.setattr(registry, "in_tree", lambda: (own,))
    added = embedded()
    table = load_reference(checkpoint.folder).get_input_embeddings()(ids)
    assert torch.equal(replaced[1:3], rows) and torch.equal(replaced[[0, 3]], table[[0, 3]])
    assert torch.equal(added[1:3], table[1:3] + rows) and torch.equal(added[[0, 3]], table[[0, 3]])
