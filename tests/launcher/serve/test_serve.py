"""`tessera serve` from start to end, with every service and the demo model."""

import json
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from shared.settings import DEMO_MODEL
from tests.support.processes.system import System
from tests.support.waiting import runs, until

pytestmark = pytest.mark.timeout(600)


def test_it_survives_kills_and_leaves_nothing_behind() -> None:
    with System() as system:
        services = {"redis", "gateway", "scheduler", "preprocess", "vision_encoder", "decoder"}
        assert set(system.pids()) == services
        assert system.base_url in system.log
        assert system.grpc_address in system.log

        before = system.kill("vision_encoder")
        until(lambda: system.pids().get("vision_encoder", [before]) != [before], "a new encoder")
        until(lambda: "vision-encoder was ended by SIGKILL" in system.log, "a word about it")

        # A killed launcher ends its processes with it, and the next one starts all the same.
        pids = system.all_pids()
        psutil.Process(system.pid).kill()
        until(lambda: not any(runs(pid) for pid in pids if pid != system.pid), "orphans")
        system.stop()
        system.start()

        pids = system.all_pids()
        assert len(system.leftovers()) == 2
        assert system.stop(signal.SIGINT) == 0
        assert not any(runs(pid) for pid in pids)
        assert system.leftovers() == []


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NoSuchModel"]
    (model / "config.json").write_text(json.dumps(config))
    system = System(model)
    with pytest.raises(AssertionError, match="ended with status 1"), system:
        pass
    assert re.search(r"NoSuchModel cannot be served; these can: .*\bLlamaForCausalLM,", system.log)
    assert len(system.log.splitlines()) == 1


def test_a_model_that_fails_while_it_is_loaded_ends_with_the_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    weights = load_file(model / "model.safetensors")
    weights["model.surprise.weight"] = next(iter(weights.values())).clone()
    save_file(weights, model / "model.safetensors")
    system = System(model, "--language-model-only")
    with pytest.raises(AssertionError, match="ended with status 1"), system:
        pass
    assert "does not come up" in system.log
    assert "model.surprise.weight" in system.log
    assert "Everything is stopped" in system.log
    assert "tessera doctor" not in system.log  # which would find nothing
