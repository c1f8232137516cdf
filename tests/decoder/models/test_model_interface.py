"""What a model file is given in each step, and what it may ask for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.decoder.loading.load import load
from services.decoder.models.layer_spec import LayerSpec, Opaque, Shared
from services.decoder.models.llama import Llama
from services.decoder.server import hello
from services.decoder.settings import DecoderSettings
from services.decoder.steps.needs import AttentionKind, Needs
from services.decoder.steps.step import Step
from shared.artifacts.store import ArtifactStore
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import EmbedRun, MediaItem, Modality
from tessera.decoder.v1 import decoder_pb2
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    running_decoder,
)

DIGEST = b"image".ljust(16, b"-")


async def recorded(
    tmp_path: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, needs: Needs
) -> tuple[Text, list[Step]]:
    """A text with an image, and what a model with these needs is given for its prompt and the token after it."""
    folder = make_checkpoint(tmp_path, "llava")
    ref = ArtifactStore(short_tmp / "artifacts", "producer", "").put(
        DIGEST, np.ones((3, 64), np.float32)
    )
    # Tokens 2 and 4 of the span keep their own embedding.
    runs = [EmbedRun(start=0, length=2), EmbedRun(start=3, length=1)]
    media = MediaItem(
        digest=DIGEST, modality=Modality.MODALITY_IMAGE, offset=2, length=5, rows=3, embed_runs=runs
    )
    seen: list[Step] = []
    forward = Llama.forward

    def keep(model: Llama, hidden: torch.Tensor, step: Step, caches: Sequence[object]) -> object:
        seen.append(step)
        return forward(model, hidden, step, caches)  # type: ignore[arg-type]

    monkeypatch.setattr(Llama, "needs", needs)
    async with running_decoder(folder, short_tmp / "s") as decoder:
        monkeypatch.setattr(Llama, "forward", keep)
        async with StepStream.open(decoder.address) as stream:
            await stream.run(make_plan(fetch=[ref]))
            while not stream.ready:
                await stream.next_message()
            text = Text(3, list(range(40, 49)), greedy(), media=[media])
            await NaiveScheduler(stream).generate([text], 2, 64)
    return text, seen


async def test_a_step_says_whose_rows_run_and_which_tokens_take_an_embedding(
    tmp_path: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, (first, second) = await recorded(tmp_path, short_tmp, monkeypatch, Needs())
    assert first.media is not None and first.media.tolist() == [2, 3, 5]
    assert first.ids[:9].tolist() == list(text.prompt)
    assert list(first.slots) == list(second.slots) == [3]
    assert second.media is None and second.ids[0] == text.output[0]
    assert not first.meta.bidirectional and not second.meta.bidirectional


@pytest.mark.parametrize(
    ("attention", "spans"),
    [
        (AttentionKind.BIDIRECTIONAL_MEDIA, [(0, 2, 4), (0, 5, 6)]),
        (AttentionKind.PREFIX_LM, [(0, 0, 9)]),
    ],
)
async def test_a_step_says_which_positions_see_each_other_whole(
    tmp_path: Path,
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: AttentionKind,
    spans: list[tuple[int, int, int]],
) -> None:
    _, (first, second) = await recorded(tmp_path, short_tmp, monkeypatch, Needs(attention))
    assert first.meta.bidirectional == spans and not second.meta.bidirectional


@pytest.mark.parametrize("layer", [Shared(0), Opaque()])
def test_a_layer_whose_cache_is_not_served_is_refused_by_name(
    llama_folder: Path, layer: LayerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = Llama.__init__

    def changed(model: Llama, *arguments: object) -> None:
        created(model, *arguments)  # type: ignore[arg-type]
        model.layers = [*model.layers[:1], layer]

    monkeypatch.setattr(Llama, "__init__", changed)
    with pytest.raises(InvalidRequest, match=f"layer 1 keeps {type(layer).__name__}"):
        load(DecoderSettings(model=llama_folder, device="cpu", threads=1))


@pytest.mark.parametrize("kind", AttentionKind)
def test_the_scheduler_is_told_how_far_attention_looks(
    llama_folder: Path, kind: AttentionKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Llama, "needs", Needs(kind))
    loaded = load(DecoderSettings(model=llama_folder, device="cpu", threads=1))
    told = hello("d", loaded).attention_kind
    assert decoder_pb2.AttentionKind.Name(told) == f"ATTENTION_KIND_{kind.name}"


def test_needs_that_speak_of_state_which_no_layer_keeps_are_refused(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Llama, "needs", Needs(state=True))
    with pytest.raises(InvalidRequest, match="keep no state outside the cache's blocks"):
        load(DecoderSettings(model=llama_folder, device="cpu", threads=1))
