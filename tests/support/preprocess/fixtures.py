"""Fixtures for tests that start preprocess: checkpoints and services. Import them in a conftest."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.launcher.redis.embedded_redis import EmbeddedRedis
from services.preprocess.settings import PreprocessSettings
from tests.support.preprocess.service import PreprocessMaker, RunningPreprocess, running
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clip_service(
    clip_folder: Path, redis_server: EmbeddedRedis
) -> AsyncIterator[RunningPreprocess]:
    """A service of `clip_folder` for those tests of a file that need no settings of their own, on the module's loop:
    starting its image worker takes a second.
    """
    async with _shared(clip_folder, redis_server) as service:
        yield service


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama_service(
    llama_folder: Path, redis_server: EmbeddedRedis
) -> AsyncIterator[RunningPreprocess]:
    """The same of `llama_folder`."""
    async with _shared(llama_folder, redis_server) as service:
        yield service


@contextlib.asynccontextmanager
async def _shared(model: Path, redis_server: EmbeddedRedis) -> AsyncIterator[RunningPreprocess]:
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        settings = PreprocessSettings(
            model=model,
            listen=f"unix:{folder}/shared.sock",
            artifact_dir=Path(folder) / "artifacts",
            media_workers=1,
            redis_url=redis_server.url,
            served_model_name="m",
            max_image_bytes=300_000,
        )
        async with running(settings) as service:
            yield service


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
