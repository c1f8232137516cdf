"""HCCL gives up before torch does, since only HCCL says which rank did not come; captured collectives run as graphs
need them."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from services.decoder.parallel import leader
from services.decoder.parallel.leader import Leader
from services.decoder.ranks import rank_group
from services.decoder.ranks.rank_group import connect
from services.decoder.ranks.share import Share
from services.decoder.settings import DecoderSettings
from shared.hardware.ascend import ENVIRONMENT


@pytest.mark.parametrize(
    ("connecting", "executing", "least"), [("600", "60", 660), ("1800", "60", 1860), ("", "", 660)]
)
def test_torch_waits_longer_than_hccl(
    connecting: str, executing: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", connecting)
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", executing)
    asked: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda _, **given: asked.append(given))
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(rank_group, "set_process_environment", lambda **_: None)
    connect(Share(0, 1), "hccl", tmp_path / "meeting")
    assert asked[0]["timeout"] >= timedelta(seconds=least)


def test_waiting_for_a_call_ends_before_waiting_for_a_rank_to_load() -> None:
    assert float(ENVIRONMENT["HCCL_EXEC_TIMEOUT"]) < float(ENVIRONMENT["HCCL_CONNECT_TIMEOUT"])


@pytest.mark.parametrize(("graphs", "mode"), [("off", None), ("on", "AIV"), ("auto", "AIV")])
def test_captured_collectives_run_on_vector_cores(
    graphs: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(leader, "set_process_environment", lambda **given: told.update(given))
    monkeypatch.setattr(leader, "resolve_device", lambda _: "npu")
    settings = DecoderSettings.model_validate({"model": "somewhere", "graphs": graphs})
    Leader.start(settings).close()  # of one rank: no process is started
    assert told.get("HCCL_OP_EXPANSION_MODE") == mode
