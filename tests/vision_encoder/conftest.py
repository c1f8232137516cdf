"""A vision_encoder service beside a preprocess service, with a real Redis and real checkpoints."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.preprocess.settings import PreprocessSettings
from services.vision_encoder.settings import VisionEncoderSettings
from tests.support.encoder_service import EncoderMaker, RunningEncoder, running
from tests.support.preprocess_service import PreprocessMaker, RunningPreprocess
from tests.support.preprocess_service import running as preprocess_running
from tests.support.vision_checkpoints import llama_checkpoint, llava_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA with a CLIP tower: 16 rows an image."""
    return llava_checkpoint(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def siglip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA with a SigLIP tower: 9 rows an image."""
    return llava_checkpoint(tmp_path_factory.mktemp("siglip"), "siglip", vision_feature_layer=-1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only model."""
    return llama_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make_encoder(redis_url: str, short_tmp: Path) -> EncoderMaker:
    """Starts an encoder for a checkpoint folder, with flags as keywords."""

    def make(
        model: Path, name: str = "e", **flags: Any
    ) -> AbstractAsyncContextManager[RunningEncoder]:
        return running(
            VisionEncoderSettings(
                model=model,
                listen=f"unix:{short_tmp}/{name}.sock",
                artifact_dir=short_tmp / "artifacts",
                redis_url=redis_url,
                served_model_name="m",
                threads=1,
                **flags,
            )
        )

    return make


@pytest.fixture
def make_preprocess(redis_url: str, short_tmp: Path) -> PreprocessMaker:
    """Starts a preprocess service for a checkpoint folder."""

    def make(
        model: Path, name: str = "p", **flags: Any
    ) -> AbstractAsyncContextManager[RunningPreprocess]:
        return preprocess_running(
            PreprocessSettings(
                model=model,
                listen=f"unix:{short_tmp}/{name}.sock",
                artifact_dir=short_tmp / "artifacts",
                redis_url=redis_url,
                served_model_name="m",
                media_workers=1,
                **flags,
            )
        )

    return make
