"""The decoder's tokens are those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.decoder.models.llama import Llama
from tests.support.checkpoints import as_torch_files, load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    make_plan,
    read_floats,
    read_ints,
    running_decoder,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Families and what may differ within each.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"text": {"tie_word_embeddings": True, "num_key_value_heads": 4}}),
    ("qwen2", {"text": {"use_sliding_window": True, "sliding_window": 9,
                        "max_window_layers": 1}}),
    ("qwen3", {}),
    ("qwen3", {"text": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32,
                        "use_sliding_window": True, "sliding_window": 7,
                        "layer_types": ["sliding_attention", "full_attention"]}}),
    ("glm", {}),
    ("glm", {"text": {"attention_bias": False, "tie_word_embeddings": True, "head_dim": 20}}),
    ("glm", {"text": {"rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
                      "head_dim": 32}}),
    ("chatglm", {}),
    ("chatglm", {"text": {"attention_bias": False, "head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5}}}),
    ("internlm2", {}),
    ("internlm2", {"text": {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 24,
                            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0,
                                                "rope_theta": 1e6}}}),
    ("qwen", {}),
    ("qwen", {"text": {"tie_word_embeddings": True, "num_hidden_layers": 3}}),
    ("glm4", {}),
    ("glm4", {"text": {"attention_bias": False, "num_key_value_heads": 1, "head_dim": 24,
                       "rope_parameters": {"rope_theta": 500.0, "rope_type": "default",
                                           "partial_rotary_factor": 1.0}}}),
    ("mistral", {}),
    ("mistral", {"text": {"sliding_window": None, "head_dim": 24}}),
    ("mistral", {"text": {"sliding_window": 2}}),
    ("llama", {"text": {"tie_word_embeddings": True}, "shard_bytes": 20_000}),
    ("llama", {"text": {"attention_bias": True, "mlp_bias": True, "head_dim": 32}}),
    ("llama", {"text": {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 48}}),
    ("llama", {"text": {"rope_parameters": LLAMA3}}),
    ("llama", {"text": {"rope_parameters": LLAMA3}, "old_rope": True}),
    ("llama", {"text": {"rope_parameters": YARN}}),
    ("qwen2", {"text": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0}},
               "old_rope": True}),
    ("llama", {"text": {"rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                            "rope_theta": 500.0}}}),
    ("llama", {"text": {"rope_parameters": {"rope_theta": 1e6}}, "old_rope": True}),
    ("llama", {"text": {"rope_parameters": {"rope_type": "longrope", "factor": 2.0,
                        "rope_theta": 10_000.0,
                        "short_factor": [1.0 + i / 8 for i in range(8)],
                        "long_factor": [2.0 + i for i in range(8)],
                        "original_max_position_embeddings": 512}}}),
]  # fmt: skip


def prompts(count: int, vocab_size: int, longest: int = 90) -> list[list[int]]:
    """Of mixed lengths, the same each time."""
    numbers = np.random.default_rng(5)
    lengths = numbers.integers(1, longest, count)
    return [numbers.integers(0, vocab_size, length).tolist() for length in lengths]


async def check(
    folder: Path, socket: Path, *, texts: int = 3, count: int = 12, chunk: int = 64, **settings: Any
) -> None:
    """Generates with the decoder and with transformers."""
    reference = load_reference(folder)
    async with (
        running_decoder(folder, socket, **settings) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        vocabulary = decoder.loaded.worker._model.config.vocab_size
        found = [
            Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts(texts, vocabulary))
        ]
        await NaiveScheduler(stream).generate(found, count, chunk)
    for text in found:
        expected, logits = greedy_tokens(reference, text.prompt, count)
        assert_same_up_to_ties(text.output, expected, logits)


@pytest.mark.parametrize("chunk", [7, 64])
async def test_sixteen_sequences_of_mixed_lengths(
    llama_folder: Path, short_tmp: Path, chunk: int
) -> None:
    await check(
        llama_folder, short_tmp / "s", texts=16, count=20, chunk=chunk, max_num_batched_tokens=2048
    )


@pytest.mark.parametrize(("family", "options"), OPTIONS)
async def test_families_and_options(
    tmp_path: Path, short_tmp: Path, family: str, options: dict[str, Any]
) -> None:
    await check(make_checkpoint(tmp_path, family, **options), short_tmp / "s")


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"shard_bytes": 20_000}), ("qwen2", {"text": {"tie_word_embeddings": True}})],
)
async def test_tokens_of_pickled_weights(
    tmp_path: Path, short_tmp: Path, family: str, options: dict[str, Any]
) -> None:
    folder = as_torch_files(make_checkpoint(tmp_path, family, **options))
    await check(folder, short_tmp / "s")


async def test_dynamic_scaling_follows_a_text_beyond_the_trained_length(
    tmp_path: Path, short_tmp: Path
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    text = {"rope_parameters": rope, "max_position_embeddings": 32}
    folder = make_checkpoint(tmp_path, "llama", text=text)
    reference = load_reference(folder)
    prompt = prompts(3, 400, 31)[0][:20]
    async with (
        running_decoder(folder, short_tmp / "s", max_model_len=128) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        found = Text(0, prompt, greedy())
        await NaiveScheduler(stream).generate([found], 60)
    expected, logits = greedy_tokens(reference, prompt, 60)
    assert_same_up_to_ties(found.output, expected, logits)


async def test_longrope_takes_its_long_factors_when_served_long(
    tmp_path: Path, short_tmp: Path
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    }
    folder = make_checkpoint(tmp_path, "llama", text={"rope_parameters": rope})
    prompt = np.random.default_rng(1).integers(0, 400, 40).tolist()
    expected, logits = greedy_tokens(load_reference(folder), prompt, 10)
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        found = Text(0, prompt, greedy())
        await NaiveScheduler(stream).generate([found], 10, chunk=16)
    assert_same_up_to_ties(found.output, expected, logits)


async def test_logits_in_bfloat16_are_as_near_as_those_of_transformers(
    llama_folder: Path, short_tmp: Path
) -> None:
    prompt = prompts(1, 400)[0]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        exact = load_reference(llama_folder)(input_ids=ids).logits[0, -1].log_softmax(-1)
        theirs = load_reference(llama_folder, torch.bfloat16)(input_ids=ids).logits[0, -1]
    vocabulary = len(exact)
    async with (
        running_decoder(llama_folder, short_tmp / "s", dtype="bfloat16") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        text = Text(0, prompt, greedy(logprobs=vocabulary))
        result = await NaiveScheduler(stream).step([text], 256)
    ours = torch.empty(vocabulary)
    ours[read_ints(result.top_ids)] = torch.tensor(read_floats(result.top_logprobs))
    allowed = (theirs.float().log_softmax(-1) - exact).abs().max()
    assert (ours - exact).abs().max() < 2 * allowed + 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_tokens_do_not_depend_on_company_or_chunks(
    llama_folder: Path, short_tmp: Path, dtype: str
) -> None:
    """What `row_invariant` promises: bit-equal log-probabilities, alone or among others."""
    texts = prompts(9, 400)
    async with (
        running_decoder(llama_folder, short_tmp / "s", dtype=dtype, threads=2) as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        assert stream.hello.row_invariant
        scheduler = NaiveScheduler(stream)
        slots = iter(range(32))

        async def log_probabilities(chosen: list[list[int]], chunk: int) -> list[list[bytes]]:
            batch = [Text(next(slots), prompt, greedy(logprobs=3)) for prompt in chosen]
            found: list[list[bytes]] = [[] for _ in chosen]
            while len(batch[0].output) < 8:
                before = [len(text.output) for text in batch]
                result = await scheduler.step(batch, chunk)
                told = iter(np.frombuffer(result.top_logprobs, "<f4").reshape(-1, 3))
                for text, row, old in zip(batch, found, before, strict=True):
                    if len(text.output) > old:
                        row.append(next(told).tobytes())
            return [row[:8] for row in found]

        [alone] = await log_probabilities(texts[:1], 256)
        [in_pieces] = await log_probabilities(texts[:1], 5)
        together = await log_probabilities(texts, 25)
        assert alone == in_pieces == together[0]


async def test_a_sequence_that_is_not_finite_fails_alone(tmp_path: Path, short_tmp: Path) -> None:
    """And leaves nothing behind for the next owner of its blocks."""
    folder = make_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    healthy, sick = [5, 6, 8, 9], [5, 6, 7, 9, 10]
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        scheduler = NaiveScheduler(stream)
        alone = Text(0, healthy, greedy())
        await scheduler.generate([alone], 5)
        both = [Text(1, sick, greedy()), Text(2, healthy, greedy())]
        result = await scheduler.step(both, 64)
        assert [(f.row, f.failure.reason) for f in result.failed] == [(0, "NAN_LOGITS")]
        assert both[0].output == [-1]
        await scheduler.generate(both[1:], 5)
        assert both[1].output == alone.output
        heir = Text(3, healthy, greedy())
        await stream.run(make_plan(drop=[1]))
        scheduler.free += both[0].blocks
        await scheduler.generate([heir], 5)
        assert heir.blocks == both[0].blocks and heir.output == alone.output


async def test_rotary_positions_of_the_models_own_are_kept_for_each_token(
    llama_folder: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation is relative: moving all positions of a text by 9 leaves its tokens as they are."""

    def moved(self: Llama, prompt: np.ndarray, media: object) -> tuple[np.ndarray, int]:
        return np.arange(len(prompt), dtype=np.int32)[None] + 9, 9

    monkeypatch.setattr(Llama, "rotary_axes", 1)
    monkeypatch.setattr(Llama, "positions", moved)
    await check(llama_folder, short_tmp / "s", chunk=20)
