"""Adapters of a whole system: each name its own text, whatever runs beside it and whoever dies."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from safetensors import safe_open

from tests.support.checkpoints import make_checkpoint
from tests.support.lora_folder import write_adapter
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

# What answers by each name that requests give: the one that the model's folder names answers for the model itself.
ANSWERS = {"base": "tiny", "one": "one", "two": "two", "tiny": "two"}
NAMES = (*ANSWERS,)
LENGTH = 150


def linears(base: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every linear layer of the decoder's layers, by its module."""
    with safe_open(base / "model.safetensors", "np") as file:
        return {
            name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118
            if name.endswith("_proj.weight")
        }


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("model")
    base = make_checkpoint(folder / "tiny", "qwen2")
    sizes = linears(base)
    one, two = (
        write_adapter(folder / name, seed, sizes=sizes, lora_alpha=0.2)
        for seed, name in enumerate(("one", "two"))
    )
    (base / "lora_adapter.json").write_text(json.dumps({"two": f"../{two.name}"}))
    flags = ("--decoders", "2", "--dtype", "float32", "--lora-modules", f"one={one}")
    with System(base, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=300) as opened:
        yield opened


def ask(client: OpenAI, name: str, **options: Any) -> str:
    answer = client.completions.create(
        model=name,
        prompt="What is in the picture?",
        max_tokens=LENGTH,
        temperature=0,
        extra_body={"ignore_eos": True},
        **options,
    )
    assert answer.model == ANSWERS[name]
    text: str = answer.choices[0].text
    return text


def test_a_killed_decoder_changes_the_text_of_no_adapter(system: System, client: OpenAI) -> None:
    undisturbed = {name: ask(client, name) for name in NAMES}
    assert len(set(undisturbed.values())) == 3 and undisturbed["tiny"] == undisturbed["two"]
    with ThreadPoolExecutor(3 * len(NAMES)) as pool:
        answers = [(name, pool.submit(ask, client, name)) for name in NAMES * 3]
        time.sleep(0.2)
        system.kill("decoder")
        for name, answer in answers:
            assert answer.result() == undisturbed[name]
    system.wait_ready()
    assert {name: ask(client, name) for name in NAMES} == undisturbed


def test_the_name_of_no_adapter_is_refused(client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        ask(client, "three")
