"""Fixtures for tests that start preprocess: checkpoints and a maker of services. Import them in a conftest."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from services.preprocess.settings import PreprocessSettings
from tests.support.preprocess_service import PreprocessMaker, RunningPreprocess, running
from tests.support.vision_checkpoints import llama_checkpoint, llava_checkpoint


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA with a CLIP tower: 16 placeholders, and rows, an image."""
    return llava_checkpoint(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def siglip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA with a SigLIP tower: 9 placeholders, and rows, an image."""
    return llava_checkpoint(tmp_path_factory.mktemp("siglip"), "siglip", vision_feature_layer=-1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only model whose template takes strings."""
    return llama_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make_preprocess(redis_url: str, short_tmp: Path) -> PreprocessMaker:
    """Starts a service for a checkpoint folder, with flags as keywords."""

    def make(
        model: Path, name: str = "p", **flags: Any
    ) -> AbstractAsyncContextManager[RunningPreprocess]:
        return running(
            PreprocessSettings(
                model=model,
                listen=f"unix:{short_tmp}/{name}.sock",
                artifact_dir=short_tmp / "artifacts",
                **{
                    "media_workers": 1,
                    "redis_url": redis_url,
                    "served_model_name": "m",
                    **flags,
                },
            )
        )

    return make
