"""A model whose class comes with its checkpoint: run by `--trust-remote-code`, refused by name without it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.processes.answers import ask_all
from tests.support.processes.system import System
from tests.support.vision_checkpoints import llama_checkpoint

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

# Unlike Llama it takes embeddings three times as large, and tells where its code is run.
MODELING = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

Path(%r).write_text("run")


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaModel):
    config_class = OwnConfig

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **options):
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=3 * embeds, position_ids=position_ids, **options)


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With `ran` beside it once its code has run."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = llama_checkpoint(tmp_path / "under-test")
    (folder / "modeling_own.py").write_text(MODELING % str(tmp_path / "ran"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"], config["model_type"] = ["OwnForCausalLM"], "own"
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_trusted_class_answers_as_it_does_by_itself(folder: Path, tmp_path: Path) -> None:
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"What is {what}?"}] for what in ("red", "blue", "a circle")
    ]
    with System(folder, "--trust-remote-code") as system:
        answers = ask_all(system.base_url, chats, 8)
        assert ask_all(system.base_url, chats, 8) == answers
    assert (tmp_path / "ran").exists()
    own = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()
    assert type(own).__name__ == "OwnForCausalLM"
    for prompt, tokens in answers:
        assert_greedy(own, prompt, tokens)


def test_without_trust_nothing_of_it_runs(folder: Path, tmp_path: Path) -> None:
    """Refused by the launcher itself, in one line, before any process is started."""
    system = System(folder)
    with pytest.raises(AssertionError, match="ended with status 1"), system:
        pass
    (line,) = system.log.splitlines()
    assert "OwnForCausalLM is code of the checkpoint itself" in line
    assert "--trust-remote-code" in line
    assert not (tmp_path / "ran").exists()
