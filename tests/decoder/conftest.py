"""Checkpoints and decoders that several tests share."""

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped queries."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
