"""LoRA adapters that PEFT has saved give what PEFT computes with them."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.errors import InvalidRequest
from shared.lora.adapter import LoraAdapter
from shared.model_backends import ModelBackend
from tessera.decoder.v1.decoder_pb2 import AdapterOutcome, LoadAdapter, StepResult
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints

# Of PEFT, by what it asks transformers for.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LINEARS = r".*(q|k|v|o|gate|up|down)_proj"
OF_LLAVA = rf".*language_model{LINEARS}"
PROMPT = [5, 17, 42, 8, 23, 61, 11]
STEPS = 8

KINDS: dict[str, Any] = {"qwen2": AutoModelForCausalLM, "llava": AutoModelForImageTextToText}


def save_adapter(base: Path, folder: Path, family: str, seed: int, **config: Any) -> Path:
    """A drawn adapter, as PEFT saves it."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 16, "target_modules": targets(family), **config}
    model = get_peft_model(KINDS[family].from_pretrained(base), LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def targets(family: str) -> str:
    return OF_LLAVA if family == "llava" else LINEARS


def expected(base: Path, family: str, adapter: Path | None) -> list[int]:
    """The greedy tokens that PEFT's model gives."""
    model = KINDS[family].from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([PROMPT])
    for _ in range(STEPS):
        with torch.inference_mode():
            chosen = model(input_ids=ids).logits[0, -1].argmax()
        ids = torch.cat([ids, chosen.view(1, 1)], 1)
    return ids[0, len(PROMPT) :].tolist()


def worker_with(base: Path, **adapters: Path) -> Worker:
    return load(settings_with(base, **adapters)).worker


def settings_with(base: Path, **adapters: Path) -> DecoderSettings:
    modules = ",".join(f"{name}={folder}" for name, folder in adapters.items())
    return DecoderSettings(
        model=base, device="cpu", dtype="float32", max_num_seqs=4, lora_modules=modules
    )


def generate(worker: Worker, lora_ids: Sequence[str]) -> list[list[int]]:
    """Greedy tokens of one prompt for each adapter, all in one batch; "" is the model itself."""
    count = len(lora_ids)
    slots = list(range(count))
    blocks = -(-(len(PROMPT) + STEPS) // worker.limits.block_size)
    new = [introduce(Text(slot, PROMPT, greedy())) for slot in slots]
    for sequence, lora_id in zip(new, lora_ids, strict=True):
        sequence.lora_id = lora_id
    opening: dict[str, Any] = {
        "new": new,
        "edit_slot": slots,
        "edit_index": [0] * count,
        "edit_len": [blocks] * count,
        "edit_blocks": list(range(1, 1 + blocks * count)),
    }
    tokens: list[list[int]] = [[] for _ in slots]
    for number in range(STEPS):
        rows = {
            "row_slot": slots,
            "row_start": [len(PROMPT) + number - 1 if number else 0] * count,
            "row_count": [1 if number else len(PROMPT)] * count,
            "sample_row": slots,
            "sample_slot": slots,
        }
        results: list[StepResult] = []
        plan = make_plan(step=number + 1, **rows, **({} if number else opening))
        worker.step(read_plan(plan, worker.limits), results.append)
        assert not results[0].failed
        for chosen, token in zip(tokens, read_ints(results[0].tokens), strict=True):
            chosen.append(token)
    worker.reset()
    return tokens


@pytest.mark.parametrize("family", ["qwen2", "llava"])
def test_two_adapters_and_the_model_itself_in_one_batch_give_what_peft_gives(
    tmp_path: Path, family: str
) -> None:
    """Each row has its own adapter; one of them is rank-stabilized and has ranks of its own for some layers."""
    base = make_checkpoint(tmp_path / "base", family)
    one = save_adapter(base, tmp_path / "one", family, 1)
    other = save_adapter(
        base,
        tmp_path / "other",
        family,
        2,
        use_rslora=True,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"0.mlp.down_proj": 3},
    )
    worker = worker_with(base, one=one, other=other)
    ids = [LoraAdapter.open(folder, 64).lora_id for folder in (one, other)]
    found = generate(worker, [ids[0], "", ids[1]])
    assert found == [expected(base, family, folder) for folder in (one, None, other)]
    assert len({tuple(tokens) for tokens in found}) == 3
    assert [generate(worker, [one])[0] for one in (ids[0], "", ids[1])] == found


def test_a_sequence_whose_adapter_is_not_there_fails_alone(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen2")
    worker = worker_with(base)
    sequence = introduce(Text(0, PROMPT, greedy()))
    sequence.lora_id = "ab" * 16
    plan = make_plan(
        step=1,
        new=[sequence, introduce(Text(1, PROMPT, greedy()))],
        edit_slot=[0, 1],
        edit_index=[0, 0],
        edit_len=[1, 1],
        edit_blocks=[1, 2],
        row_slot=[0, 1],
        row_start=[0, 0],
        row_count=[len(PROMPT)] * 2,
        sample_row=[0, 1],
        sample_slot=[0, 1],
    )
    results: list[StepResult] = []
    worker.step(read_plan(plan, worker.limits), results.append)
    [failed] = results[0].failed
    assert (failed.row, failed.failure.reason) == (0, "ADAPTER_CHANGED")
    assert read_ints(results[0].tokens)[1] == expected(base, "qwen2", None)[0]


@pytest.mark.parametrize(
    ("family", "modules", "named"),
    [
        ("llava", r".*vision_tower.*(q|v)_proj", "vision_tower"),
        ("qwen2", ["embed_tokens"], "embed_tokens"),
        ("qwen2", ["lm_head"], "lm_head"),
    ],
)
def test_what_is_no_linear_layer_of_the_decoder_is_refused_by_name(
    tmp_path: Path, family: str, modules: Any, named: str
) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    adapter = save_adapter(base, tmp_path / "a", family, 1, target_modules=modules)
    with pytest.raises(InvalidRequest) as caught:
        worker_with(base, a=adapter)
    assert named in caught.value.message


def test_a_model_whose_code_has_no_place_for_adapters_refuses_them(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen2")
    adapter = save_adapter(base, tmp_path / "a", "qwen2", 1)
    settings = settings_with(base, a=adapter).model_copy(
        update={"model_backend": ModelBackend.TRANSFORMERS}
    )
    with pytest.raises(InvalidRequest) as caught:
        load(settings)
    assert caught.value.reason == "UNSUPPORTED_ADAPTER"


def loading_worker(base: Path, folder: Path, places: int) -> Worker:
    changes = {"allowed_adapter_dir": folder, "max_loras": places}
    return load(settings_with(base).model_copy(update=changes)).worker


def apply(worker: Worker, **fields: Any) -> list[AdapterOutcome]:
    """What became of the adapters that a plan loads."""
    heard = threading.Event()
    worker.adapters.listen(heard.set)
    worker.step(worker.accept(make_plan(step=1, **fields)), lambda result: None)
    if fields.get("load_adapters"):
        assert heard.wait(60)
    return worker.adapters.report()


def test_adapters_that_plans_load_give_what_peft_gives(tmp_path: Path) -> None:
    """One takes the place of another, and comes back."""
    base = make_checkpoint(tmp_path / "base", "qwen2")
    below = tmp_path / "adapters"
    folders = {
        LoraAdapter.open(folder, 64).lora_id: folder
        for folder in (save_adapter(base, below / str(seed), "qwen2", seed) for seed in (1, 2))
    }
    one, other = folders
    texts = {lora_id: expected(base, "qwen2", folder) for lora_id, folder in folders.items()}
    worker = loading_worker(base, below, 1)
    assert worker.adapters.places == 1
    before = ""
    for lora_id in (one, other, one):
        load_it = [LoadAdapter(lora_id=lora_id, folder=str(folders[lora_id]))]
        unload = [before] if before else []
        [outcome] = apply(worker, load_adapters=load_it, unload_adapters=unload)
        assert not outcome.HasField("failure")
        assert generate(worker, [lora_id, ""]) == [texts[lora_id], expected(base, "qwen2", None)]
        assert worker.adapters.loaded == [lora_id]
        before = lora_id


def test_other_weights_than_were_loaded_are_not_read(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen2")
    below = tmp_path / "adapters"
    folder = save_adapter(base, below / "a", "qwen2", 1)
    elsewhere = save_adapter(base, tmp_path / "elsewhere", "qwen2", 1)
    lora_id = LoraAdapter.open(folder, 64).lora_id
    worker = loading_worker(base, below, 2)
    shutil.rmtree(folder)
    save_adapter(base, folder, "qwen2", 2)
    for where, reason in ((folder, "ADAPTER_CHANGED"), (elsewhere, "ADAPTER_NOT_ALLOWED")):
        loads = [LoadAdapter(lora_id=lora_id, folder=str(where))]
        [outcome] = apply(worker, load_adapters=loads)
        assert (outcome.lora_id, outcome.failure.reason) == (lora_id, reason)
    worker.reset()
    assert worker.adapters.loaded == []
