"""Decoder and vision encoder in containers on a simulated NPU: `pytest -m compose`, needs a Docker daemon and g++."""

import os
from collections.abc import Iterator

import pytest

from tests.ascend.environment import prepare
from tests.support.processes.compose import Stack
from tests.support.processes.demo_question import ask, unseen

FILES = ("compose.yaml", "compose.ascend.yaml", "tests/ascend/compose.ci.yaml")
pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    if problem := prepare():
        assert os.environ.get("CI") != "true", problem
        pytest.skip(problem)
    # Of each number of rows a graph is captured, slowly on this device.
    with Stack(project="tessera-ascend", files=FILES, TESSERA_MAX_NUM_SEQS="4") as stack:
        yield stack


def test_a_picture_is_answered_from_containers_on_npus(stack: Stack) -> None:
    answer = ask(stack.base_url, stack.served_model, within_s=300)
    assert unseen(answer) == [], answer
    for service in ("decoder", "vision-encoder"):
        assert "device=npu" in stack.compose("logs", "--no-color", service), service
