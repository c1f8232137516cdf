"""What the decoder is asked about ranks before anything is started."""

from pathlib import Path

import pytest

from services.launcher.ranks import require_divisible
from services.launcher.settings import ServeSettings
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.support.generic_models import make_generic_checkpoint
from tests.support.processes.loud_libraries import make_loud


def settings_of(folder: Path) -> ServeSettings:
    return ServeSettings.load([str(folder), "--tensor-parallel-size", "2"])


def test_what_libraries_print_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divisible = make_generic_checkpoint(tmp_path / "a", "gemma2")
    undivided = make_generic_checkpoint(tmp_path / "b", "deepseek_v2")
    make_loud(tmp_path / "loud", monkeypatch)
    require_divisible(settings_of(divisible), Checkpoint(divisible))
    with pytest.raises(InvalidRequest, match="in a way which is not served") as refused:
        require_divisible(settings_of(undivided), Checkpoint(undivided))
    assert "ASCEND_HOME_PATH" not in refused.value.message
