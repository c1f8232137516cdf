"""One model for all tests that only ask it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.launcher.offline import LLM
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model that takes pictures."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen2_vl")


@pytest.fixture(scope="package")
def llm(folder: Path) -> Iterator[LLM]:
    """It, being served."""
    with LLM(folder, dtype="float32", max_model_len=512) as running:
        yield running
