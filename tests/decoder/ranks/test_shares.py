"""Ranks that have a part of every layer compute together what one process computes with the whole model."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.cache_spec import paged_layers
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.generic.loading import load_model
from services.decoder.parallel.refusal import require_divisible
from services.decoder.ranks.rank_group import RankGroup
from services.decoder.ranks.share import Share
from services.decoder.steps.step import Step
from services.families import registry
from services.families.family import load_part
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from tests.reference_models import molmo, wemm
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.thread_ranks import ThreadRanks, run_ranks
from tests.support.generic_models import make_generic_checkpoint

LONGEST = 64
# Two texts: a prompt of 9 tokens, of which those in MEDIA take an embedding row, and one token alone.
COUNTS, MEDIA = [1, 9], slice(4, 7)


class Answer:
    """What a model makes of the texts: last hidden rows, logits, and the largest of them."""

    def __init__(self, model: DecoderModel, ops: BaseOps) -> None:
        tokens = sum(COUNTS)
        draw = torch.Generator().manual_seed(3)
        ids = torch.randint(3, 90, (tokens,), generator=draw)
        positions = torch.tensor([0, *range(9)]).tile(max(1, model.rotary_axes), 1)
        blocks = torch.tensor([[1], [2]], dtype=torch.int32)
        slots = torch.tensor([16, *range(32, 41)])
        meta = ops.make_meta(COUNTS, COUNTS, blocks, slots)
        takes_row = torch.tensor(range(tokens)[MEDIA])
        step = Step(ids, positions, meta, slots=range(2), media=takes_row)
        rows = torch.randn(3, model.config.hidden_size, generator=draw).to(ops.dtype)
        hidden = model.embed(ids, [rows], [(MEDIA.start, 3)])
        caches = [ops.alloc_kv(layer, 3) for layer in paged_layers(model.layers)]
        before = 0 if ops.ranks is None else ops.ranks.calls
        self.hidden = model.forward(hidden, step, caches)
        if ops.ranks is not None:
            assert ops.ranks.calls - before == model.sums > 0
        self.logits = model.logits(self.hidden)
        self.largest = model.largest(self.hidden)
        self.cache_bytes = sum(ops.block_bytes(layer) for layer in paged_layers(model.layers))


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While transformers loads a model it changes settings of the whole process."""
    loading = threading.Lock()

    def load_alone(*given: Any) -> Any:
        with loading:
            return load_model(*given)

    monkeypatch.setattr("services.decoder.models.generic.decoder.load_model", load_alone)


def answer(
    folder: Path, ranks: RankGroup | None = None, dtype: torch.dtype = torch.float32
) -> Answer:
    ops = BaseOps(torch.device("cpu"), dtype)
    ops.ranks, ops.share = ranks, Share() if ranks is None else ranks.share
    checkpoint = Checkpoint(folder)
    family = registry.find_decoder(checkpoint)
    return Answer(load_part(family.decoder).load(checkpoint, ops, LONGEST), ops)


def check(folder: Path, size: int) -> None:
    with torch.inference_mode():
        whole = answer(folder)
    parts = run_ranks(size, lambda ranks: answer(folder, ranks))
    for part in parts:
        assert torch.equal(part.hidden, parts[0].hidden)
        torch.testing.assert_close(part.logits, whole.logits, rtol=2e-4, atol=2e-4)
        ids, values = part.largest
        assert torch.equal(values, part.logits.amax(-1))
        assert torch.equal(ids.long(), part.logits.argmax(-1))


@pytest.mark.parametrize(
    ("family", "size", "text"),
    [
        ("llama", 2, {"mlp_bias": True, "attention_bias": True}),
        ("llama", 2, {"vocab_size": 401}),
        ("llama", 4, {"tie_word_embeddings": True}),  # two heads of keys and values
        ("qwen2", 2, {}),
        ("qwen3", 2, {}),
        ("mistral", 2, {}),
        ("glm", 2, {}),
        ("glm4", 2, {}),
        ("chatglm", 2, {}),
        ("internlm2", 4, {}),
        ("qwen", 2, {}),
        ("qwen2_vl", 2, {}),
        ("qwen2_5_vl", 2, {}),
    ],
)
def test_shares_of_families(tmp_path: Path, family: str, size: int, text: dict[str, Any]) -> None:
    check(make_checkpoint(tmp_path, family, text=text), size)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {}),
        pytest.param("gemma2", {"attention_bias": True, "final_logit_softcapping": None}, marks=pytest.mark.full),
        pytest.param("cohere2", {}, marks=pytest.mark.full),
        ("mixtral", {}),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"moe_intermediate_size": 33}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_shares_of_models_by_the_code_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    check(make_generic_checkpoint(tmp_path, family, **changes), 2)


@pytest.mark.parametrize("write", [molmo.write_checkpoint, wemm.write_checkpoint])
def test_shares_of_models_with_other_embeddings_and_low_rank_additions(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    check(write(tmp_path), 2)


def test_each_rank_has_its_part_of_the_cache(llama_folder: Path) -> None:
    with torch.inference_mode():
        whole = answer(llama_folder)
    halves = run_ranks(2, lambda ranks: answer(llama_folder, ranks))
    assert [half.cache_bytes for half in halves] == [whole.cache_bytes // 2] * 2


def test_of_equal_logits_of_several_ranks_the_first_is_the_largest() -> None:
    logits = torch.tensor([[1.0, 5, 5, 5, 2], [0, 1, 2, 3, 9], [1, 2, float("nan"), 4, 5]])

    def largest(ranks: ThreadRanks) -> tuple[Tensor, Tensor]:
        own = logits[:, slice(*ranks.share.range(5))]
        values, _ = own.max(-1)
        first = (own == values[:, None]).to(torch.uint8).argmax(-1)
        return ranks.largest(first, values, 5)

    for ids, values in run_ranks(3, largest):
        assert ids[:2].tolist() == [1, 4] and values[:2].tolist() == [5, 9]
        assert values[2].isnan() and 0 <= int(ids[2]) < 5


@pytest.mark.parametrize(
    ("family", "size", "text", "reason"),
    [
        ("llama", 3, {}, "4 attention heads, which do not divide by it"),
        ("llama", 2, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, "3 heads of keys"),
        ("llama", 2, {"intermediate_size": 97}, "97 units between the layers of its MLP"),
        ("mllama", 2, {}, "layers that attend to pictures"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused(
    tmp_path: Path, family: str, size: int, text: dict[str, Any], reason: str
) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, family, text=text))
    with pytest.raises(InvalidRequest, match=rf"--tensor-parallel-size {size}: .*{reason}"):
        require_divisible(checkpoint, size, ModelBackend.AUTO)


@pytest.mark.parametrize(
    ("family", "size", "changes", "reason"),
    [
        ("gemma2", 2, {"num_key_value_heads": 1}, "1 heads of keys and values"),
        ("deepseek_v2", 2, {}, "divided in a way which is not served .*mla_kv_a_proj"),
    ],
)
def test_what_does_not_divide_by_the_code_of_transformers_is_refused(
    tmp_path: Path, family: str, size: int, changes: dict[str, Any], reason: str
) -> None:
    checkpoint = Checkpoint(make_generic_checkpoint(tmp_path, family, **changes))
    with pytest.raises(InvalidRequest, match=rf"--tensor-parallel-size {size}: .*{reason}"):
        require_divisible(checkpoint, size, ModelBackend.AUTO)


def test_norms_of_all_heads_are_refused(tmp_path: Path) -> None:
    folder = molmo.write_checkpoint(tmp_path, attention_layer_norm=True)
    with pytest.raises(InvalidRequest, match="norms of all heads together"):
        require_divisible(Checkpoint(folder), 2, ModelBackend.AUTO)
