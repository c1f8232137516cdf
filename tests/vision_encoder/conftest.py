"""A vision_encoder service beside a preprocess service, with a real Redis and real checkpoints."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.vision_encoder.settings import VisionEncoderSettings
from tests.support.preprocess.fixtures import (
    clip_folder,
    clip_service,
    llama_folder,
    make_preprocess,
    siglip_folder,
)
from tests.support.vision_encoder.service import EncoderMaker, RunningEncoder, running

__all__ = [
    "clip_folder",
    "clip_service",
    "llama_folder",
    "make_encoder",
    "make_preprocess",
    "siglip_folder",
]

torch.set_num_threads(1)


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
