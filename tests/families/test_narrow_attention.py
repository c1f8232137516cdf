"""What an Ascend 310P has no attention for is refused from a model's files, before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest

from services.families import check
from services.families.check import Parts, require_servable
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.generic_models import make_generic_checkpoint


@pytest.fixture(autouse=True)
def _npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "require_computable", lambda *_: None)
    monkeypatch.setattr(check, "resolve_device", lambda name: name)
    monkeypatch.setattr(check, "is_310p", lambda: True)


@pytest.mark.parametrize(
    ("family", "changes", "refused"),
    [
        ("gemma2", {}, "a soft cap"),
        ("gpt_oss", {}, "sinks"),
        ("llama4", {}, "chunks"),
        ("mixtral", {"head_dim": 272}, "heads of 272 elements"),
        ("mixtral", {"head_dim": 256, "sliding_window": 24}, ""),
    ],
)
def test_attention_that_there_is_not_is_named(
    tmp_path: Path, family: str, changes: dict[str, Any], refused: str
) -> None:
    folder = make_generic_checkpoint(tmp_path, family, **changes)
    if refused:
        with pytest.raises(InvalidRequest, match=f"{refused}.*310P: use a 910B"):
            require_servable(folder, device="npu", parts=Parts.WEIGHTS)
        assert require_servable(folder, device="cpu", parts=Parts.WEIGHTS)
    else:
        assert require_servable(folder, device="npu", parts=Parts.WEIGHTS)


def test_a_native_model_with_windows_is_served(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral", text={"sliding_window": 9})
    assert require_servable(folder, device="npu", parts=Parts.WEIGHTS)
