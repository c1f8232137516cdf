"""How many tokens a step may have that holds what a model needs whole."""

from pathlib import Path

import pytest

from services.decoder.loading.load import load
from services.decoder.loading.step_size import step_size
from services.decoder.models.llama import Llama
from services.decoder.settings import DecoderSettings
from services.decoder.steps.needs import AttentionKind, Needs
from services.families import registry
from shared.checkpoint.folder import Checkpoint
from tessera.common.v1.media_pb2 import Modality
from tests.support.checkpoints import make_checkpoint

MEDIA, PREFIX = AttentionKind.BIDIRECTIONAL_MEDIA, AttentionKind.PREFIX_LM


def test_the_largest_step_holds_the_longest_row_and_a_token_for_each_slot(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path / "model", "llava"))
    picture = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE).tokens
    assert 0 < picture < 400

    def size(needs: Needs, usual: int) -> tuple[int, int]:
        found = step_size(needs, checkpoint, usual, 8, 400)
        return found.usual, found.largest

    assert size(Needs(), 100) == (100, 100)
    assert size(Needs(MEDIA), 4) == (4, picture + 8)
    assert size(Needs(MEDIA), 300) == (300, max(300, picture + 8))
    assert size(Needs(PREFIX), 100) == (100, 408)
    assert size(Needs(whole_prompt=True), 100) == (400, 408)
    assert size(Needs(whole_prompt=True), 1000) == (1000, 1000)
    assert size(Needs(state=True), 100) == (100, 100)
    short = step_size(Needs(MEDIA), checkpoint, 4, 8, picture - 1)
    assert short.largest == picture - 1 + 8  # a longer one is in no prompt


def test_memory_is_measured_for_the_largest_step(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DecoderSettings(model=llama_folder, device="cpu", threads=1, max_model_len=600)
    usual = load(settings)
    monkeypatch.setattr(Llama, "needs", Needs(whole_prompt=True))
    whole = load(settings)
    assert whole.worker.limits.max_step_tokens == 600 + settings.max_num_seqs
    assert whole.profile.step_bytes > usual.profile.step_bytes
