"""A gateway on real sockets, with its neighbours played through the real contracts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.gateway import Gateway, open_gateway
from services.gateway.timings import USUAL, Timings
from tests.support.gateway.stage import MODEL, Stage, open_stage, until_ready, write_model
from tests.support.network.http import plain_client
from tests.support.tokenizers import byte_level_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture
def model_folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return write_model(tmp_path / MODEL, tokenizer)


@pytest.fixture
def timings() -> Timings:
    """Those of `stage`: a test has others by a parameter of this name."""
    return USUAL


@pytest.fixture
async def stage(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, timings: Timings
) -> AsyncIterator[Stage]:
    async with open_stage(redis_url, model_folder, tokenizer, APIS, timings) as opened:
        yield opened


@pytest.fixture
async def other(stage: Stage) -> AsyncIterator[Gateway]:
    """A second gateway on the same Redis."""
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.2})
    async with open_gateway(settings) as gateway:
        async with plain_client(gateway.url) as client:
            await until_ready(client)
        yield gateway
