"""The figures that ship with our models are of these models."""

from pathlib import Path

import pytest

from benchmarks.quality.text_model.export import CHECKPOINT as TEXT_MODEL
from benchmarks.quality.ways import WAYS
from services.decoder.loading.quality import read_quality
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint
from shared.settings import DEMO_MODEL


@pytest.mark.parametrize("folder", [DEMO_MODEL, TEXT_MODEL])
def test_our_models_have_figures_of_their_own_weights(folder: Path) -> None:
    quality = read_quality(folder, content_digest(Checkpoint(folder)))
    assert quality is not None and quality.kl.keys() == WAYS.keys()
