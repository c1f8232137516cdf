"""A decoder of two ranks answers as one of one; one of its ranks is killed while requests run. Weights are as they are
stored, and quantized."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from openai import OpenAI

from tests.e2e.test_failures import KINDS, ask, disturb
from tests.support.checkpoints import make_checkpoint
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@pytest.fixture(scope="module", params=["none", "int8", "int4g32"])
def system(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[System]:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llava")
    flags = ("--tensor-parallel-size", "2", "--quantization", request.param)
    with System(folder, "--served-model-name", "tiny", *flags) as started:
        yield started


def second_rank(system: System) -> psutil.Process:
    [decoder] = system.pids()["decoder"]
    [rank] = psutil.Process(decoder).children()
    return rank


def test_a_killed_rank_changes_no_answer(system: System) -> None:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=300) as client:
        undisturbed = {
            (kind, number): ask(client, kind, number) for kind in KINDS for number in range(2)
        }
        rank = second_rank(system)
        disturb(client, undisturbed, lambda: os.kill(rank.pid, signal.SIGKILL))
    system.wait_ready()
    assert second_rank(system).pid != rank.pid
    lines = [line for line in system.log.splitlines() if "a rank is lost" in line]
    assert len(lines) == 1 and "rank=1" in lines[0] and "was ended by signal 9" in lines[0]


def test_ranks_end_with_their_decoder(system: System) -> None:
    rank = second_rank(system)
    system.kill("decoder")
    rank.wait(10)
    system.wait_ready()
