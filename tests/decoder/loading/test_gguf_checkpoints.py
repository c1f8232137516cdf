"""GGUF files: codes as they are stored, and logits as the numbers that they stand for give them."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.decoder.loading.load import Loaded, load
from services.decoder.models.llama import Llama
from services.decoder.settings import DecoderSettings
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.gguf.block_types import CODED
from shared.checkpoint.gguf.header import read_header
from shared.checkpoint.gguf.prepared import prepared_folder
from shared.errors import InvalidRequest
from shared.weights.coded_rows import CodedRows
from shared.weights.readers.gguf import is_exact, read_blocks, read_numbers
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.gguf_files import Types, dequantized, quantized, write_gguf
from tests.support.decoder.prompts_step import PROMPTS, run_prompts
from tests.support.decoder.step_stream import greedy, read_floats

# Of rows that are whole blocks of K-quants.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
}
HEADS = 4, 2
# As llama.cpp mixes types: of queries, keys and values, and of gates and what they gate, some have more bits.
MIXED = {
    "attn_v": Kind.Q6_K,
    "attn_k": Kind.Q8_0,
    "attn_q": Kind.Q4_K,
    "ffn_down": Kind.Q6_K,
    "ffn_up": Kind.F16,
    "output": Kind.Q6_K,
    "": Kind.Q4_K,
}
ALIKE = {
    kind.name: {"": kind}
    for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ3_S)
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are prepared are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(tmp_path: Path, family: str, types: Types, **text: object) -> tuple[Path, Path]:
    """A folder with a file and a tokenizer, and a checkpoint of transformers of the numbers that `gguf.dequantize`
    gives of it."""
    numbers = make_checkpoint(tmp_path / "numbers", family, text=SIZES | text)
    folder = tmp_path / "codes"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(numbers / name, folder)
    file = write_gguf(folder / "some.gguf", numbers, types)
    path = numbers / "model.safetensors"
    stored = dequantized(file, load_file(path), HEADS if family == "llama" else None)
    save_file({n: t.contiguous() for n, t in stored.items()}, path, {"format": "pt"})
    return folder, numbers


def loaded(folder: Path, **values: object) -> Loaded:
    told = {"model": prepared_folder(folder), "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
    return load(DecoderSettings.model_validate({**told, "threads": 1, **values}))


def log_probabilities(one: Loaded) -> torch.Tensor:
    return torch.tensor(read_floats(run_prompts(one.worker, greedy(logprobs=0)).logprobs)).double()


def expected_of(numbers: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        numbers, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    return torch.stack(logits).log_softmax(-1).amax(-1)


@pytest.mark.parametrize("kind", sorted(CODED))
def test_blocks_are_the_numbers_that_their_library_says(kind: str) -> None:
    rows = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    blocks = quantized(rows, Kind[kind])
    expected = torch.from_numpy(gguf.dequantize(blocks, Kind[kind]))
    stored = torch.from_numpy(blocks)
    assert torch.equal(read_numbers(kind, stored), expected)
    if is_exact(kind):
        assert torch.equal(read_blocks(kind, stored).dequantize(torch.float32), expected)


@pytest.mark.parametrize(
    ("family", "types"),
    [
        *(("llama", types) for types in ALIKE.values()),
        ("llama", MIXED),
        ("qwen2", MIXED),
        ("qwen3", MIXED),
    ],
    ids=[*ALIKE, "llama", "qwen2", "qwen3"],
)
def test_a_decoder_of_a_file_says_what_its_numbers_say(
    tmp_path: Path, family: str, types: Types
) -> None:
    folder, numbers = written(tmp_path, family, types)
    with capture_logs() as logs:
        one = loaded(folder)
    [line] = [line for line in logs if line["event"] == "quantized weights"]
    # Four of its layer, and the head.
    assert (line["scheme"], line["layers"]) == ("of the checkpoint", 5)
    # Activations have 14 bits; of IQ3_S weights too are rounded, to 8.
    near = 2e-1 if types == ALIKE["IQ3_S"] else 2e-2
    assert torch.allclose(log_probabilities(one), expected_of(numbers), atol=near)


@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "blk.0.ffn_norm.weight"])
def test_scales_and_numbers_that_are_none_are_refused_by_their_name(
    tmp_path: Path, name: str
) -> None:
    folder, _ = written(tmp_path, "qwen2", MIXED)
    file = folder / "some.gguf"
    place = read_header(file).tensors[name].begin
    content = bytearray(file.read_bytes())
    # Of a block of Q6_K the scale is last; of float32 the upper half has the exponent.
    at = place + (208 if "down" in name else 2)
    content[at : at + 2] = b"\xff\x7f"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=rf"some.gguf: the tensor {name} cannot be used: "):
        loaded(folder)


def test_codes_become_numbers_where_that_is_asked_for(tmp_path: Path) -> None:
    folder, numbers = written(tmp_path, "llama", MIXED, tie_word_embeddings=True)
    with capture_logs() as logs:
        one = loaded(folder, quantization="none", dtype="float32")
    assert not [line for line in logs if line["event"] == "quantized weights"]
    assert torch.allclose(log_probabilities(one), expected_of(numbers), atol=2e-3)
    assert one.fingerprint != loaded(folder, dtype="float32").fingerprint


def test_positions_are_scaled_as_llama_3_1_scales_them(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    numbers = make_checkpoint(tmp_path / "numbers", "llama", text=SIZES | {"rope_parameters": rope})
    config = AutoConfig.from_pretrained(numbers)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    plain = 1e4 ** -(torch.arange(0, 64, 2) / 64)

    def factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())

    folder = tmp_path / "codes"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(numbers / name, folder)
    write_gguf(folder / "some.gguf", numbers, {"": Kind.F32}, factors)
    found = log_probabilities(loaded(folder, dtype="float32"))
    assert torch.allclose(found, expected_of(numbers), atol=1e-3)


def test_rows_of_the_embedding_stay_in_the_file(tmp_path: Path) -> None:
    folder, numbers = written(tmp_path, "qwen2", MIXED)
    weights = Llama._weights(Checkpoint(prepared_folder(folder)))
    expected = load_file(numbers / "model.safetensors")["model.embed_tokens.weight"]
    table = weights.take_table("embed_tokens.weight", *expected.shape)
    assert isinstance(table, CodedRows) and len(table) == len(expected)
    ids = torch.tensor([7, 0, 7, 301])
    assert torch.equal(table.rows(ids), expected[ids].float())
    assert torch.equal(table.dense(torch.float32), expected.float())


def test_layers_of_a_file_are_cut_and_stacked_as_their_numbers(tmp_path: Path) -> None:
    folder, numbers = written(tmp_path, "llama", ALIKE["Q4_K"])
    weights = Llama._weights(Checkpoint(prepared_folder(folder)))
    expected = load_file(numbers / "model.safetensors")
    for part, out, inputs in (("self_attn.q_proj", 256, 256), ("mlp.down_proj", 256, 512)):
        stored = expected[f"model.layers.0.{part}.weight"].float()
        weight = weights.take_linear(f"layers.0.{part}", out, inputs)
        codes = weight.quantized()
        assert codes is not None and (codes.bits, codes.group) == (4, 32)
        assert torch.equal(codes.dequantize(torch.float32), stored)
        assert torch.equal(weight.shard("out", [(3, 70)]).dense(torch.float32), stored[3:70])
        half = weight.shard("in", [(128, 256)]).quantized()
        assert half is not None and torch.equal(half.dequantize(torch.float32), stored[:, 128:256])
