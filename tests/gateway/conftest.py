"""A gateway on real sockets, with its neighbours played through the real contracts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.gateway_stage import MODEL, Stage, open_stage, write_model
from support.tokenizers import byte_level_tokenizer
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture
def model_folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return write_model(tmp_path / MODEL, tokenizer)


@pytest.fixture
async def stage(redis_url: str, model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Stage]:
    async with open_stage(redis_url, model_folder, tokenizer) as opened:
        yield opened
