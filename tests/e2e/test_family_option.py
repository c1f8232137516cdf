"""`--family NAME`: a model is served as that family, whatever its config.json calls itself."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from services.launcher import check
from tests.e2e.test_failures import ask
from tests.support.checkpoints import make_checkpoint
from tests.support.processes.system import System

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.full,
    pytest.mark.xdist_group("system_of_two"),
]


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `system_of_two` under names that nobody knows."""
    folder = make_checkpoint(tmp_path_factory.mktemp("renamed") / "tiny", "qwen2_vl")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["CompanyVLForChat"], "model_type": "company_vl"}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def served_as(renamed: Path) -> Iterator[System]:
    with System(renamed, "--dtype", "float32", "--family", "qwen2_vl") as running:
        yield running


def test_the_answers_are_those_of_the_family(served_as: System, system_of_two: System) -> None:
    answers = []
    for system in (served_as, system_of_two):
        with OpenAI(base_url=system.base_url, api_key="none", max_retries=0) as client:
            answers.append([ask(client, "greedy", number, 30) for number in range(2)])
    assert answers[0] == answers[1]


def test_the_model_is_refused_without_it(renamed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(renamed)]) == 1
    assert "CompanyVLForChat cannot be served" in capsys.readouterr().out
    assert check.main([str(renamed), "--family", "qwen2_vl"]) == 0
    assert "Qwen2VLEncoder" in capsys.readouterr().out
