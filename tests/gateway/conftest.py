"""A gateway on real sockets, with its neighbours played through the real contracts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.gateway import Gateway, open_gateway
from services.gateway.timings import USUAL, Timings
from tests.support.gateway.pooled_stages import (
    classifies_of,
    embeds_of,
    numbers_of,
    scores_of,
)
from tests.support.gateway.stage import (
    MODEL,
    PLAIN,
    Stage,
    StagedModel,
    open_stage,
    until_ready,
)
from tests.support.network.http import plain_client


@pytest.fixture(scope="module")
def staged_model(request: pytest.FixtureRequest) -> StagedModel:
    """A test file has another by the name STAGED_MODEL."""
    found: StagedModel = getattr(request.module, "STAGED_MODEL", PLAIN)
    return found


@pytest.fixture(scope="module")
def tokenizer(staged_model: StagedModel) -> Tokenizer:
    return staged_model.tokenizer()


@pytest.fixture
def model_folder(tmp_path: Path, staged_model: StagedModel, tokenizer: Tokenizer) -> Path:
    return staged_model.write(tmp_path / MODEL, tokenizer)


@pytest.fixture
def timings() -> Timings:
    """Those of `stage`: a test has others by a parameter of this name."""
    return USUAL


@pytest.fixture
async def stage(
    redis_url: str,
    model_folder: Path,
    staged_model: StagedModel,
    tokenizer: Tokenizer,
    timings: Timings,
) -> AsyncIterator[Stage]:
    async with open_stage(redis_url, model_folder, tokenizer, APIS, timings) as opened:
        opened.says(staged_model.answer)
        yield opened


@pytest.fixture
async def other(stage: Stage) -> AsyncIterator[Gateway]:
    """A second gateway on the same Redis."""
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.2})
    async with open_gateway(settings) as gateway:
        async with plain_client(gateway.url) as client:
            await until_ready(client)
        yield gateway


@pytest.fixture
async def embeds(redis_url: str, tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Stage]:
    """A server of vectors."""
    async with embeds_of(redis_url, tmp_path / MODEL, tokenizer) as opened:
        opened.scheduler.vector = numbers_of
        yield opened


@pytest.fixture
async def classifies(redis_url: str, tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Stage]:
    """A classifier of two labels."""
    async with classifies_of(redis_url, tmp_path / MODEL, tokenizer) as opened:
        opened.scheduler.vector = lambda spec: [1.0, 3.0]
        yield opened


@pytest.fixture
async def scores(redis_url: str, tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Stage]:
    """A classifier of one label."""
    async with scores_of(redis_url, tmp_path / MODEL, tokenizer) as opened:
        opened.scheduler.vector = lambda spec: [len(spec.prompt) / 64]
        yield opened
