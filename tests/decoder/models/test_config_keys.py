"""Keys of config.json mean what the classes of transformers make of them, those that a class does not have included."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN

from services.families import generic, registry
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.decoder.models.test_tokens import check, prompts
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

WINDOW = {"use_sliding_window": True, "sliding_window": 5}
MIXED = ["sliding_attention", "full_attention"]


def edited(folder: Path, **changes: Any) -> Path:
    """With other values in config.json, which transformers would not have written so."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def with_biases(folder: Path, *layers: str) -> Path:
    """With a bias, far from 0, stored beside the weights of these layers of every block."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(3)
    for name, weight in list(tensors.items()):
        if name.removesuffix(".weight").endswith(layers):
            tensors[name.replace(".weight", ".bias")] = torch.randn(weight.shape[0])
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {**WINDOW, "max_window_layers": 0}, [None, None]),
        ("llama", {**WINDOW, "layer_types": MIXED}, [None, None]),
        ("glm", WINDOW, [None, None]),
        ("mistral", {"sliding_window": 5, "use_sliding_window": False}, [5, 5]),
        ("mistral", {"sliding_window": 5, "max_window_layers": 1}, [5, 5]),
        ("mistral", {"sliding_window": 5, "layer_types": MIXED}, [5, 5]),
        ("qwen2", {**WINDOW, "sliding_window": None, "layer_types": None}, [None, None]),
        ("qwen2", {**WINDOW, "max_window_layers": 1, "layer_types": None}, [None, 5]),
        ("qwen3", {"sliding_window": 5, "layer_types": None}, [None, None]),
    ],
)
async def test_windows(
    tmp_path: Path,
    short_tmp: Path,
    family: str,
    changes: dict[str, Any],
    windows: list[int | None],
) -> None:
    """Of `forward` itself: the cache of `generate` drops what `sliding_window` leaves out, whatever the class does."""
    folder = edited(make_checkpoint(tmp_path, family), **changes)
    assert list(registry.decoder_config(Checkpoint(folder)).windows) == windows
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts(2, 400))]
        await NaiveScheduler(stream).generate(texts, 12)
    for text in texts:
        assert_greedy(load_reference(folder), text.prompt, text.output)


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("qwen2", {"attention_bias": False, "mlp_bias": True}, ()),
        ("llama", {}, ("q_proj", "o_proj", "up_proj")),
        ("mistral", {"attention_bias": True}, ("q_proj", "k_proj", "v_proj")),
        ("qwen3", {"mlp_bias": True}, ("down_proj",)),
    ],
)
async def test_biases(
    tmp_path: Path, short_tmp: Path, family: str, changes: dict[str, Any], layers: tuple[str, ...]
) -> None:
    folder = edited(with_biases(make_checkpoint(tmp_path, family), *layers), **changes)
    await check(folder, short_tmp / "s")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
async def test_a_part_of_each_head_is_turned_by_classes_that_have_the_key(
    tmp_path: Path, short_tmp: Path, family: str
) -> None:
    folder = edited(make_checkpoint(tmp_path, family), partial_rotary_factor=0.5)
    await check(folder, short_tmp / "s")
    rope = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(InvalidRequest, match=r"partial_rotary_factor 0\.5 is not supported"):
        registry.decoder_config(Checkpoint(edited(folder, rope_parameters=rope)))


@pytest.mark.parametrize(("family", "heads"), [("qwen2", 4), ("llama", 4)])
async def test_as_many_heads_of_keys_as_of_queries_where_null_says_so(
    tmp_path: Path, short_tmp: Path, family: str, heads: int
) -> None:
    folder = make_checkpoint(tmp_path, family, text={"num_key_value_heads": heads})
    await check(edited(folder, num_key_value_heads=None), short_tmp / "s")


@pytest.mark.parametrize(
    ("family", "activation"), [("llama", "gelu"), ("qwen2", "relu"), ("glm", "gelu_pytorch_tanh")]
)
async def test_other_activations_are_served_by_the_code_of_transformers(
    tmp_path: Path, short_tmp: Path, family: str, activation: str
) -> None:
    folder = make_checkpoint(tmp_path, family, text={"hidden_act": activation})
    assert registry.find_decoder(Checkpoint(folder)) is generic.GENERIC
    assert activation in dict.keys(ACT2FN)
    await check(folder, short_tmp / "s")


def test_activations_that_nobody_has_are_refused_by_name(tmp_path: Path) -> None:
    folder = edited(make_checkpoint(tmp_path, "llama"), hidden_act="novel")
    with pytest.raises(InvalidRequest, match="hidden_act 'novel'"):
        registry.text_sizes(Checkpoint(folder))
    assert set(dict.keys(ACT2FN)) - {"silu", "swish"} >= generic.OTHER_ACTIVATIONS
