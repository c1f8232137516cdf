"""What names an adapter, how strong it is, and what is refused of it and of --lora-modules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

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


@pytest.mark.parametrize(
    "text", ["a", "a=", "=x", "a=x,a=y", "base=x", "served=x", "a\nb=x", f"{'a' * 257}=x"]
)
def test_what_names_no_adapter_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_modules(text, "served", 64, tmp_path)
    assert caught.value.reason == "BAD_LORA_MODULES"


def name_adapters(model: Path, said: object) -> None:
    (model / "lora_adapter.json").write_text(json.dumps(said))


def test_a_models_folder_names_adapters_of_which_the_only_one_is_the_default(
    tmp_path: Path,
) -> None:
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2)
    name_adapters(tmp_path, {"a": "one"})  # relative to it
    found = open_modules("", "served", 64, tmp_path)
    assert (found.adapters["a"].folder, found.default, found.own) == (one, "a", ())
    # The flag goes before the file, and before its default.
    found = open_modules(f"a={two},b={one}", "served", 64, tmp_path, "b")
    assert (found.adapters["a"].folder, found.default) == (two, "b")
    assert open_modules("", "served", 64, tmp_path, "base").default == ""
    name_adapters(tmp_path, {"a": "one", "b": str(two)})
    assert open_modules("", "served", 64, tmp_path).default == ""
    assert [*open_modules("", "served", 64, tmp_path, "b").adapters] == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "default", "names"),
    [
        (["one"], "", "lora_adapter.json"),
        ({"a": 7}, "", "lora_adapter.json"),
        ({"a": ""}, "", "lora_adapter.json"),
        ({"base": "one"}, "", "'base' is the model itself"),
        ({"served": "one"}, "", "served model's own name"),
        ({"a": "absent"}, "", "lora_adapter.json: 'a': .*absent"),
        ({"a": "one"}, "b", "--lora-adapter-id: there is no adapter 'b' at the start"),
        ({}, "a", "--lora-adapter-id: .*only 'base'"),
        ({"a": "."}, "", "'a' names the model's own folder"),
    ],
)
def test_what_a_models_folder_cannot_name_is_refused(
    said: object, default: str, names: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "one")
    save_file({"x.weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    name_adapters(tmp_path, said)
    with pytest.raises(InvalidRequest, match=names) as caught:
        open_modules("", "served", 64, tmp_path, default)
    assert caught.value.reason == "BAD_LORA_MODULES"


def test_the_models_own_partial_lora_is_the_model_itself(tmp_path: Path) -> None:
    """As WeMM's release names it, by its absolute folder."""
    name = "model.layers.0.attention.wo.Plora_A.weight"
    save_file({name: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    name_adapters(tmp_path, {"wemm": str(tmp_path)})
    found = open_modules("", "served", 64, tmp_path)
    assert (found.adapters, found.own, found.default) == ({}, ("wemm",), "wemm")
