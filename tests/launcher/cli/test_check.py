"""`tessera check`: by whose code a model would be served, or why it would not be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.families.check import Parts
from services.families.prepare import prepare_model
from services.gateway.settings import GatewaySettings
from services.launcher import check
from shared.checkpoint.folder import Checkpoint
from shared.demo_model import __file__ as demo
from tests.reference_models import wemm
from tests.support.checkpoints import make_checkpoint


def said(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    status: int = 0,
    backend: str = "auto",
    *flags: str,
) -> dict[str, str]:
    """The report, by the first word of each line."""
    assert check.main([str(folder), "--model-backend", backend, *flags]) == status
    lines = capsys.readouterr().out.splitlines()
    return {first: rest.strip() for first, _, rest in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize(
    ("family", "prompt", "media"),
    [
        ("qwen3", "native", set()),
        ("llava", "native", {"images"}),
        ("qwen2_vl", "native", {"images", "videos"}),
        ("idefics3", "transformers", {"images"}),
    ],
)
def test_each_part_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    prompt: str,
    media: set[str],
) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    report = said(folder, capsys, 0, "auto", "--skip-model-check")  # which takes ten seconds
    assert report["prompt"].startswith(f"{prompt}: ") and report["decoder"].startswith("native: ")
    assert report.get("encoder", "").startswith(f"{prompt}: ") == bool(media)
    assert {"images", "videos"} & report.keys() == media
    own, others = (int(word) for word in report["tensors"].split() if word.isdigit())
    assert (
        own > 0 and own + others == len(Checkpoint(folder).names()) and bool(others) == bool(media)
    )
    assert report["off"] == "nothing"


def test_what_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "llava")
    config = json.loads((folder / "config.json").read_text())
    text = {**config["text_config"], "model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))
    report = said(folder, capsys, 1)  # by the comparison with its class
    assert (
        report["decoder"].startswith("transformers: ") and "cannot be served" in report["refused"]
    )
    report = said(folder, capsys, 1, "native")
    assert report["prompt"].startswith("native") and report["encoder"].startswith("native")
    assert report["decoder"].startswith("refused: ") and "mamba" in report["decoder"]

    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Strange"]}))
    assert "Strange" in said(folder, capsys, 1)["prompt"]

    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.extra": torch.zeros(1)}, folder / "model.safetensors")
    assert "model.extra" in said(folder, capsys, 1)["refused"]
    assert "refused" in said(tmp_path / "nowhere", capsys, 1)
    assert "config.json" in said(tmp_path, capsys, 1)["refused"]
    vision = {**config["vision_config"], "image_size": "large"}
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": vision}))
    assert "refused" in said(folder, capsys, 1)


def test_a_model_is_named_by_its_type_where_it_has_no_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = said(wemm.write_checkpoint(tmp_path / "wemm"), capsys)
    assert report["model"].startswith("wemm ") and report["decoder"].startswith("native: ")
    assert report["ends"] == "at </s> (2), <|im_end|> (565)"


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"700": {"content": "<|x|>"}}}, "700"),
        ("added_tokens.json", {"<|x|>": 700}, "700"),
        ("config.json", {"vocab_size": 463}, "463"),
    ],
)
def test_an_id_beyond_the_models_vocabulary_is_refused_by_file_token_and_id(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    change: dict[str, Any],
    named: str,
) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **change}))
    refusal = said(folder, capsys, 1)["refused"]
    origin, token = ("tokenizer.json", "<tool call>") if file == "config.json" else (file, "<|x|>")
    assert f"{folder / origin}: the token {token!r} has the id {named}" in refusal
    with pytest.raises(SystemExit):  # as a service does at its start
        prepare_model(GatewaySettings(model=folder), Parts.TOKENIZER)


@pytest.mark.parametrize(
    "change", [{"pad_token": "<tool call>"}, {"image_token": "<tool call>"}, {}]
)
def test_ids_of_padding_and_of_media_may_lie_beyond_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    """As of released folders of Llama 2 with a token for padding, and of Gemma 3 without pictures."""
    folder = make_checkpoint(tmp_path, "llama", text={"vocab_size": 463})
    for name, more in {
        "tokenizer_config.json": change,
        "config.json": {} if change else {"image_token_index": 463},
    }.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    assert "refused" not in said(folder, capsys)


def test_the_demo_model_is_checked_unless_another_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.main([]) == 0
    assert str(Path(demo).parent) in capsys.readouterr().out
