"""An adapter gives what a model gives whose weights it was merged into: of every family, device and rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.loading.load import load
from services.decoder.models.adapters import Adapter, pack_addition
from services.decoder.models.cache_spec import paged_layers
from services.decoder.models.llama import Llama
from services.decoder.ranks.share import Share
from services.decoder.settings import DecoderSettings
from services.decoder.steps.step import Step
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from services.families import registry
from services.families.family import load_part
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.weights.linear_weight import in_memory
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.decoder.instruction_sets import RUNNABLE, open_kernels
from tests.support.decoder.lora import Matrices, adapt, draw_lora, merge, pack, tokens_of_slots
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints
from tests.support.decoder.thread_ranks import ThreadRanks, run_ranks

CPU = torch.device("cpu")
COUNTS = [1, 9]
TOKENS = sum(COUNTS)
LONGEST = 64

Make = Callable[[], BaseOps]


class WideHeads(BaseOps):
    """Heads filled up with zeros, as on an NPU."""

    def head_width(self, size: int) -> int:
        """See `BaseOps.head_width`."""
        return 2 * size


def plain() -> BaseOps:
    return BaseOps(CPU, torch.float32)


def wide() -> BaseOps:
    return WideHeads(CPU, torch.float32)


def own() -> BaseOps:
    return CpuOps(torch.float32, open_kernels(RUNNABLE[0]))


def decoder_class(folder: Path) -> type[Llama]:
    found: type[Llama] = load_part(registry.find_decoder(Checkpoint(folder)).decoder)
    return found


def load_model(folder: Path, ops: BaseOps) -> Llama:
    return decoder_class(folder).load(Checkpoint(folder), ops, LONGEST)


def logits(model: Llama, ops: BaseOps) -> Tensor:
    """Of one text of a token and one of nine: [10, vocabulary]."""
    ids = torch.randint(3, 90, (TOKENS,), generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([0, *range(9)]).tile(max(1, model.rotary_axes), 1)
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    meta = ops.make_meta(COUNTS, COUNTS, table, torch.tensor([16, *range(32, 41)]))
    caches = [ops.alloc_kv(layer, 3) for layer in paged_layers(model.layers)]
    step = Step(ids, positions, meta, slots=range(2))
    with torch.inference_mode():
        return model.logits(model.forward(model.embed(ids, [], []), step, caches))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("make", [plain, wide, own])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "glm", "glm4", "chatglm", "internlm2", "qwen"]
)
def test_an_adapter_on_every_linear_layer_is_as_good_as_merged(
    tmp_path: Path, family: str, make: Make
) -> None:
    """Whether queries, keys and values, or gates and what they gate, are stored as one or by themselves."""
    folder = make_checkpoint(tmp_path / "base", family)
    lora = draw_lora(folder, decoder_class(folder).canonical, 5)
    expected = load_model(merge(folder, tmp_path / "merged", lora), ops := make())
    model = load_model(folder, ops)
    before = logits(model, ops)
    adapter = pack(lora, model.config, ops)
    found = logits(adapt(model, lambda step: [(adapter, torch.arange(TOKENS))]), ops)
    close(found, logits(expected, ops))
    assert (found - before).abs().amax(-1).amin() > 0.1


@pytest.mark.parametrize(
    "name", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
)
def test_each_rank_adds_its_part(tmp_path: Path, name: str) -> None:
    """Four ranks with two heads of keys: some are computed twice."""
    folder = make_checkpoint(tmp_path / "base", "llama")
    _check_ranks(tmp_path, folder, 4, [name])


@pytest.mark.parametrize("family", ["chatglm", "internlm2"])
def test_each_rank_adds_its_part_of_what_is_stored_as_one(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "base", family)
    _check_ranks(tmp_path, folder, 2, None)


def _check_ranks(tmp_path: Path, folder: Path, size: int, names: Sequence[str] | None) -> None:
    lora = draw_lora(folder, decoder_class(folder).canonical, 5, names)
    expected = logits(load_model(merge(folder, tmp_path / "merged", lora), plain()), plain())

    def work(ranks: ThreadRanks) -> Tensor:
        ops = plain()
        ops.ranks, ops.share = ranks, ranks.share
        model = load_model(folder, ops)
        adapter = pack(lora, model.config, ops)
        return logits(adapt(model, lambda step: [(adapter, torch.arange(TOKENS))]), ops)

    for part in run_ranks(size, work):
        close(part, expected)


def test_a_matrix_for_other_sizes_is_refused_before_it_is_cut(llama_folder: Path) -> None:
    ops = plain()
    ops.share = Share(1, 2)
    config = registry.decoder_config(Checkpoint(llama_folder))
    hidden = config.hidden_size
    down, up = in_memory(torch.zeros(2, hidden)), in_memory(torch.zeros(hidden + 1, 2))
    with pytest.raises(InvalidRequest, match=f"q_proj takes {hidden} inputs to"):
        pack_addition("q_proj", down, up, config, ops)
    with pytest.raises(InvalidRequest, match="no linear layer embed_tokens"):
        pack_addition("embed_tokens", down, up, config, ops)


class ReferenceDevice(CpuDevice):
    """The CPU by the reference alone."""

    def _make_ops(self, dtype: torch.dtype, threads: int) -> BaseOps:
        return BaseOps(CPU, dtype)


# Slots of a worker: without an adapter, with the first, with the second, with both.
PROMPTS = [np.random.default_rng(n).integers(0, 400, 9 + 7 * n).tolist() for n in range(4)]
SLOTS = range(4)
STEPS = 8


@pytest.mark.parametrize("device", ["base", "cpu"])
def test_sequences_of_a_step_each_have_their_own_adapters(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and tokens of four sequences through the worker, beside each other; merged weights in transformers."""
    folder = make_checkpoint(tmp_path / "base", "llama", text={"attention_bias": True})
    canonical = decoder_class(folder).canonical
    first = draw_lora(folder, canonical, 1)
    second = draw_lora(folder, canonical, 2, ["k_proj", "o_proj", "up_proj"], rank=7)
    kind = {"base": ReferenceDevice, "cpu": CpuDevice}[device]
    monkeypatch.setattr("services.decoder.loading.load.device_class", lambda name: kind)
    settings = {"model": folder, "device": "cpu", "threads": 1, "kv_cache_memory_bytes": 4 << 20}
    worker = load(DecoderSettings.model_validate(settings)).worker
    model, ops = worker._model, worker._device.ops
    assert isinstance(model, Llama)
    assert type(ops) is (BaseOps if device == "base" else CpuOps)
    adapters = [pack(lora, model.config, ops) for lora in (first, second)]

    def choose(step: Step) -> Sequence[tuple[Adapter, Tensor]]:
        chosen = zip(adapters, ({1, 3}, {2, 3}), strict=True)
        return [(adapter, tokens_of_slots(step, slots)) for adapter, slots in chosen]

    adapt(model, choose)
    found = _generate(worker)
    loras: list[list[list[Matrices]]] = [[], [first], [second], [first, second]]
    outputs = []
    for slot, merged in zip(SLOTS, loras, strict=True):
        reference = load_reference(merge(folder, tmp_path / f"merged{slot}", *merged))
        outputs.append(greedy_tokens(reference, PROMPTS[slot], STEPS))
        assert_same_up_to_ties(found[slot], *outputs[-1])
    unadapted = load_reference(folder)
    for slot in (1, 2, 3):
        assert greedy_tokens(unadapted, PROMPTS[slot], STEPS)[0] != outputs[slot][0]


def _generate(worker: Worker) -> list[list[int]]:
    """Greedy tokens after each prompt: the prompts in one step, then a token of each in every step."""
    lengths = [len(prompt) for prompt in PROMPTS]
    blocks = -(-(max(lengths) + STEPS) // worker.limits.block_size)
    count = len(PROMPTS)
    opening: dict[str, Any] = {
        "new": [introduce(Text(slot, PROMPTS[slot], greedy())) for slot in SLOTS],
        "edit_slot": list(SLOTS),
        "edit_index": [0] * count,
        "edit_len": [blocks] * count,
        "edit_blocks": list(range(1, 1 + blocks * count)),
    }
    tokens: list[list[int]] = [[] for _ in SLOTS]
    for number in range(STEPS):
        rows = {
            "row_slot": list(SLOTS),
            "row_start": [length + number - 1 if number else 0 for length in lengths],
            "row_count": [1] * count if number else lengths,
            "sample_row": list(SLOTS),
            "sample_slot": list(SLOTS),
        }
        results: list[Any] = []
        plan = make_plan(step=number + 1, **rows, **({} if number else opening))
        worker.step(read_plan(plan, worker.limits), results.append)
        assert not results[0].failed
        for chosen, token in zip(tokens, read_ints(results[0].tokens), strict=True):
            chosen.append(token)
    return tokens
