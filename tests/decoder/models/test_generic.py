"""Families that the code of transformers runs give the tokens of transformers, whatever a scheduler does with them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3

from services.decoder.loading.load import load
from services.decoder.models.generic import attention
from services.decoder.settings import DecoderSettings
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.compared import take_as_compared
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.decoder.plans import go_on, new_text, whole_prompt
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    read_ints,
    running_decoder,
)
from tests.support.generic_models import each, make_generic_checkpoint

_COUNT = 10
_NUMBERS = np.random.default_rng(5)
PROMPTS = [
    _NUMBERS.integers(3, 400, int(length)).tolist() for length in (37, 5, 61, 16, 1, 90, 33, 48)
]


# It scales queries by logarithms of positions, which torch rounds by their number.
UNEQUAL_ROWS = ("llama4",)


class Model:
    """A checkpoint, and what transformers says to prompts."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder = family, folder
        self._reference = load_reference(folder)
        self._known: dict[int, tuple[list[int], Tensor]] = {}

    def expected(self, number: int) -> list[int]:
        """The tokens after PROMPTS[number]."""
        return self._ask(number)[0]

    def check(self, number: int, tokens: list[int]) -> None:
        """Raises AssertionError for other tokens than transformers has, but for ties."""
        expected, logits = self._ask(number)
        assert_same_up_to_ties(tokens, expected[: len(tokens)], logits)

    def _ask(self, number: int) -> tuple[list[int], Tensor]:
        if number not in self._known:
            self._known[number] = greedy_tokens(self._reference, PROMPTS[number], _COUNT)
        return self._known[number]


@pytest.fixture(scope="module", params=each())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Of a family that the code of transformers runs."""
    family = request.param
    return Model(family, make_generic_checkpoint(tmp_path_factory.mktemp(family), family))


@pytest.fixture
async def stream(model: Model, short_tmp: Path) -> AsyncIterator[StepStream]:
    async with (
        running_decoder(model.folder, short_tmp / "s", num_host_blocks=8) as decoder,
        StepStream.open(decoder.address) as opened,
    ):
        yield opened


async def test_tokens_alone_together_and_in_pieces(model: Model, stream: StepStream) -> None:
    scheduler = NaiveScheduler(stream)
    alone = [Text(0, PROMPTS[0], greedy())]
    await scheduler.generate(alone, _COUNT)
    together = [Text(slot + 1, prompt, greedy()) for slot, prompt in enumerate(PROMPTS)]
    await scheduler.generate(together, _COUNT, chunk=16)
    for number, text in enumerate([*together, *alone]):
        model.check(number % len(PROMPTS), text.output)
    assert stream.hello.row_invariant == (model.family not in UNEQUAL_ROWS)


async def test_blocks_move_and_are_shared(model: Model, stream: StepStream) -> None:
    """A prefix of another's blocks, a fork with its copy, blocks swapped out, and a preemption."""
    prompt, expected = PROMPTS[0], model.expected(0)  # two full blocks and a partly filled one
    await stream.run(make_plan(**new_text(prompt, 0, [1, 2, 3, 4]), **whole_prompt(prompt, 0)))
    found = await stream.run(
        make_plan(**new_text(prompt, 1, [1, 2, 5, 6]), row_slot=[1], row_start=[32],
                  row_count=[len(prompt) - 32], sample_row=[0], sample_slot=[1])
    )  # fmt: skip
    assert read_ints(found.tokens) == expected[:1]
    await stream.run(
        make_plan(fork_child=[2], fork_parent=[0], fork_choice=[1], copy_src=[3], copy_dst=[7],
                  edit_slot=[2], edit_index=[0], edit_len=[4], edit_blocks=[1, 2, 7, 8])
    )  # fmt: skip
    assert await go_on(stream, 2, len(prompt), 4) == expected[1:5]
    await stream.run(
        make_plan(edit_slot=[1], edit_index=[2], edit_len=[0], edit_blocks=[],
                  swap_out_device=[5], swap_out_host=[3])
    )  # fmt: skip
    await stream.run(
        make_plan(edit_slot=[1], edit_index=[2], edit_len=[2], edit_blocks=[9, 10],
                  swap_in_host=[3], swap_in_device=[9])
    )  # fmt: skip
    assert await go_on(stream, 1, len(prompt), 4) == expected[1:5]
    await stream.run(make_plan(edit_slot=[0], edit_index=[0], edit_len=[0], edit_blocks=[]))
    await stream.run(
        make_plan(edit_slot=[0], edit_index=[0], edit_len=[4], edit_blocks=[11, 12, 13, 14],
                  row_slot=[0], row_start=[0], row_count=[20])
    )  # fmt: skip
    await stream.run(make_plan(row_slot=[0], row_start=[20], row_count=[len(prompt) - 20]))
    assert await go_on(stream, 0, len(prompt), 4) == expected[1:5]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        (
            "qwen2",
            {"text": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}},
        ),
        ("qwen3", {"text": {"tie_word_embeddings": True}}),
        ("mistral", {}),
        pytest.param("llava", {}, marks=pytest.mark.full),
        pytest.param("qwen2_vl", {}, marks=pytest.mark.full),
    ],
)
async def test_the_code_of_transformers_gives_the_tokens_of_ours(
    tmp_path: Path, short_tmp: Path, family: str, options: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, family, **options)
    found = []
    for backend in ModelBackend.NATIVE, ModelBackend.TRANSFORMERS:
        take_as_compared(folder, backend)
        async with (
            running_decoder(folder, short_tmp / backend, model_backend=backend) as decoder,
            StepStream.open(decoder.address) as stream,
        ):
            assert ("generic" in type(decoder.loaded.worker._model).__module__) == (
                backend != ModelBackend.NATIVE
            )
            texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(PROMPTS[:4])]
            await NaiveScheduler(stream).generate(texts, 8, chunk=20)
            found.append([text.output for text in texts])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_does_not_compute_what_its_class_does_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    folder = make_generic_checkpoint(tmp_path, "gemma2")
    options: dict[str, Any] = {"model": folder, "device": "cpu", "threads": 1, "dtype": dtype}
    assert load(DecoderSettings(**options)).row_invariant
    # As for a class whose windows come by no way that is known here: the served length is far below them.
    monkeypatch.setattr(attention, "_reach", lambda *_: (None, None))
    with pytest.raises(InvalidRequest, match=r"differs from its own forward .* from layer 0 on"):
        load(DecoderSettings(**options, max_model_len=16))
    unchecked = load(DecoderSettings(**options, skip_model_check=True))
    assert not unchecked.row_invariant


@pytest.mark.full
def test_a_model_whose_images_see_each_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_block(types: Tensor, device: torch.device) -> Tensor:
        return torch.where(types.to(device) == 1, 0, -1)

    folder = take_as_compared(make_checkpoint(tmp_path / "gemma3", "gemma3"))
    monkeypatch.setattr(modeling_gemma3, "get_block_sequence_ids_for_mask", one_block)
    with pytest.raises(InvalidRequest, match="see each other"):
        load(DecoderSettings(model=folder, dtype="float32", kv_cache_memory_bytes=1 << 20))


# With the sinks of the second seed it does so, here, for a third of the tokens of the first prompts.
@pytest.mark.parametrize(
    ("family", "seed"),
    [("gpt_oss", 0), ("gpt_oss", 24), ("llama4", 0), ("mixtral", 0), ("deepseek_v3", 0)],
)
def test_experts_in_bfloat16_are_served_though_rounding_chooses_others(
    tmp_path: Path, family: str, seed: int
) -> None:
    folder = make_generic_checkpoint(tmp_path, family, seed)
    loaded = load(DecoderSettings(model=folder, device="cpu", threads=1, dtype="bfloat16"))
    assert loaded.row_invariant == (family not in UNEQUAL_ROWS)


@pytest.mark.parametrize("seed", [0, 24])
def test_experts_in_bfloat16_whose_windows_are_ignored_are_refused(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_generic_checkpoint(tmp_path, "gpt_oss", seed)
    monkeypatch.setattr(attention, "_reach", lambda *_: (None, None))
    with pytest.raises(InvalidRequest, match="differs from its own forward"):
        load(DecoderSettings(model=folder, device="cpu", threads=1, dtype="bfloat16"))


def test_the_code_that_runs_the_layers_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Blocks of one kind of decoder are not taken for those of the other."""
    folder = make_checkpoint(tmp_path, "llama")
    options: dict[str, Any] = {"model": folder, "device": "cpu", "threads": 1}
    native, other = (
        load(DecoderSettings(**options, model_backend=backend)).fingerprint
        for backend in ("native", "transformers")
    )
    assert native != other


def test_rotations_of_changing_frequencies_are_fixed_or_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    folder = make_checkpoint(tmp_path, "llama", text={"rope_parameters": rope})
    options: dict[str, Any] = {
        "model": folder,
        "device": "cpu",
        "threads": 1,
        "model_backend": "transformers",
    }
    with pytest.raises(InvalidRequest, match="give --max-model-len 512"):
        load(DecoderSettings(**options, max_model_len=600))
    assert load(DecoderSettings(**options, max_model_len=512))
