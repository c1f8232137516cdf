"""Decoder and vision encoder in containers on a simulated NPU: `pytest -m compose`, needs a Docker daemon and g++."""

import os
import re
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
    devices = {"ASCEND_DECODER_DEVICES": "0,1", "ASCEND_ENCODER_DEVICES": "2"}
    # Of each number of rows a graph is captured, slowly on this device.
    devices["TESSERA_MAX_NUM_SEQS"] = "4"
    with Stack(project="tessera-ascend", files=FILES, **devices) as stack:
        yield stack


def test_a_picture_is_answered_from_containers_on_npus(stack: Stack) -> None:
    answer = ask(stack.base_url, stack.served_model, within_s=300)
    assert unseen(answer) == [], answer
    for service in ("decoder", "vision-encoder"):
        assert "device=npu" in stack.compose("logs", "--no-color", service), service


def test_two_decoders_lease_different_devices_and_a_third_gets_none(stack: Stack) -> None:
    stack.up(decoder=2)
    leased = re.findall(
        r"NPUs leased.*devices='?(\d+)\b", stack.compose("logs", "--no-color", "decoder")
    )
    assert sorted(leased) == ["0", "1"]
    answer = ask(stack.base_url, stack.served_model, within_s=300)
    assert unseen(answer) == [], answer
    with pytest.raises(
        AssertionError, match=r"1 of the NPUs 0, 1 are needed, and of these 0 are free"
    ):
        stack.compose("run", "--rm", "--no-deps", "-T", "decoder")
