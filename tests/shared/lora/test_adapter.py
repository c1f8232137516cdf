"""What names an adapter, how strong it is, and what is refused of it and of --lora-modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import InvalidRequest
from shared.lora.adapter import LoraAdapter
from shared.lora.modules import absolute, open_modules, parse_modules
from tests.support.lora_folder import MODULE, write_adapter


def test_the_digest_depends_on_what_is_computed_alone(tmp_path: Path) -> None:
    def lora_id(name: str, **changes: Any) -> str:
        return LoraAdapter.open(write_adapter(tmp_path / name, **changes), 64).lora_id

    first = lora_id("first")
    assert lora_id("same", base_model_name_or_path="elsewhere", revision="main") == first
    others = {
        lora_id("drawn", seed=1),
        lora_id("alpha", lora_alpha=5),
        lora_id("root", use_rslora=True),
    }
    assert len(others | {first}) == 4


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 4 / 2),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 6}}, 6 / 2),
        ({"alpha_pattern": {"k_proj": 6}}, 4 / 2),
        ({"alpha_pattern": {r"layers\.1\..*": 6, r".*\.q_proj": 10}}, 10 / 2),
        ({"r": 16, "rank_pattern": {"q_proj": 2}}, 4 / 2),
    ],
)
def test_the_scale_is_as_peft_has_it(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    adapter = LoraAdapter.open(write_adapter(tmp_path / "a", **config), 64)
    assert adapter.linears[MODULE].scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": "two"}, "adapter_config.json"),
        ({"r": 3}, "rank of 3"),
        ({"rank": 65}, "--max-lora-rank 64"),
        ({"sizes": {}}, "no tensors"),
        (
            {"tensors": {"base_model.model.model.embed_tokens.weight": np.ones((2, 2))}},
            "embed_tokens",
        ),
        ({"tensors": {"base_model.model.x.lora_A.weight": np.ones((2, 2))}}, "lora_A alone"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LoraAdapter.open(write_adapter(tmp_path / "a", **changes), 64)
    assert named in caught.value.message


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20])
    for broken in (folder, tmp_path / "nowhere"):
        with pytest.raises(InvalidRequest):
            LoraAdapter.open(broken, 64)
    weights.unlink()
    with pytest.raises(InvalidRequest, match="does not exist"):
        LoraAdapter.open(folder, 64)


def test_modules_are_folders_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_modules("a=/x, b=y") == {"a": Path("/x"), "b": Path("y")}
    assert absolute("a=/x,b=y") == f"a=/x,b={tmp_path}/y"


@pytest.mark.parametrize("text", ["a", "a=", "=x", "a=x,a=y", "base=x", "a\nb=x", f"{'a' * 257}=x"])
def test_what_names_no_adapter_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_modules(text, "base", 64)
    assert caught.value.reason == "BAD_LORA_MODULES"
