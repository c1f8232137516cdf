"""Adapters that are loaded while a whole system runs: at one gateway for all, whoever dies."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.test_lora import linears
from tests.support.checkpoints import make_checkpoint
from tests.support.lora_folder import write_adapter
from tests.support.processes.system import System

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.full,
    # Of PEFT, by what it asks transformers for.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

NAMES = ("one", "two", "three")
PROMPT = [5, 17, 42, 8, 23, 61, 11]
COMPARED = 12
LENGTH = 150
OF_SECOND_GATEWAY = 10  # to the port of the first


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen2")


@pytest.fixture(scope="module")
def folders(base: Path) -> dict[str, Path]:
    sizes = linears(base)
    changes: dict[str, Any] = {"lora_alpha": 0.2, "target_modules": r".*_proj"}
    return {
        name: write_adapter(base.parent / "adapters" / name, seed, sizes=sizes, **changes)
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def system(base: Path, folders: dict[str, Path]) -> Iterator[System]:
    """Each decoder has places for two of the three adapters."""
    flags = ("--decoders", "2", "--gateways", "2", "--dtype", "float32", "--max-loras", "2")
    allowed = ("--allowed-adapter-dir", str(base.parent / "adapters"))
    with System(base, *flags, *allowed) as running:
        yield running


@pytest.fixture
def gateways(system: System) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    ports = (system.port, system.port + OF_SECOND_GATEWAY)
    one, other = (httpx.Client(base_url=f"http://127.0.0.1:{p}", timeout=300) for p in ports)
    with one, other:
        yield one, other


def load(gateway: httpx.Client, name: str, folder: Path) -> None:
    body = {"lora_name": name, "lora_path": str(folder)}
    reply = gateway.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 200, reply.text


def ask(gateway: httpx.Client, name: str, length: int = LENGTH) -> list[int]:
    """The greedy tokens of an answer."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": length, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    deadline = time.monotonic() + 120
    reply = gateway.post("/v1/completions", json={**body, **more})
    while reply.status_code == 503 and time.monotonic() < deadline:  # Redis is starting
        time.sleep(0.2)
        reply = gateway.post("/v1/completions", json={**body, **more})
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


def of_peft(base: Path, folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder)
    ids = torch.tensor([PROMPT])
    for _ in range(COMPARED):
        with torch.inference_mode():
            chosen = model(input_ids=ids).logits[0, -1].argmax()
        ids = torch.cat([ids, chosen.view(1, 1)], 1)
    return ids[0, len(PROMPT) :].tolist()


def test_what_one_gateway_has_loaded_all_serve_whoever_dies(
    system: System,
    gateways: tuple[httpx.Client, httpx.Client],
    base: Path,
    folders: dict[str, Path],
) -> None:
    one, other = gateways
    for name in NAMES:
        load(one, name, folders[name])
    texts = {name: ask(other, name) for name in NAMES}
    for name in NAMES:
        assert texts[name][:COMPARED] == of_peft(base, folders[name])
    assert len({tuple(text) for text in texts.values()}) == len(NAMES)
    with ThreadPoolExecutor(3 * len(NAMES)) as pool:
        answers = [(name, pool.submit(ask, other, name)) for name in NAMES * 3]
        time.sleep(0.2)
        system.kill("decoder")
        for name, answer in answers:
            assert answer.result() == texts[name]
    system.wait_ready()
    for service in ("decoder", "scheduler", "redis"):
        system.kill(service)
        system.wait_ready()
        assert {name: ask(one, name) for name in NAMES} == texts


def test_what_is_unloaded_while_it_answers_ends_its_answers(
    system: System, gateways: tuple[httpx.Client, httpx.Client], folders: dict[str, Path]
) -> None:
    one, other = gateways
    load(one, "passing", folders["one"])
    expected = ask(one, "passing")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, one, "passing") for _ in range(4)]
        while not (one.get("/load").json()["server_load"] or any(a.done() for a in answers)):
            time.sleep(0.01)
        gone = other.post("/v1/unload_lora_adapter", json={"lora_name": "passing"})
        assert gone.status_code == 200, gone.text
        system.kill("decoder")  # whoever goes on reads the adapter again
        finished = [answer.exception() or answer.result() for answer in answers]
    # One that had not been admitted by then is refused by its name.
    assert [found for found in finished if found == expected]
    assert all(found == expected or "model_not_found" in str(found) for found in finished)
    for gateway in gateways:
        assert gateway.get("/v1/models/passing").status_code == 404
