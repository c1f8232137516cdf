"""GGUF files of architectures other than Llama and Qwen: logits as transformers computes them of the checkpoint that
the file was made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from services.decoder.loading.load import Loaded, load
from services.decoder.settings import DecoderSettings
from shared.checkpoint.gguf import prepared
from shared.checkpoint.gguf.prepared import prepared_folder
from shared.errors import InvalidRequest
from tests.support.checkpoints.gguf_architectures import MADE, make_numbers, write_numbers
from tests.support.decoder.prompts_step import PROMPTS, run_prompts
from tests.support.decoder.step_stream import greedy, read_floats

# One of each way in which tensors are changed; the others are alike.
_FIRST = ("gemma2", "mixtral", "chatglm", "gptneox")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are prepared are the test's, and without the tokenizers that these files do not have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "_write_tokenizer", lambda folder, file: None)


def made(
    tmp_path: Path,
    name: str,
    kind: Kind = Kind.F32,
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
) -> tuple[Path, Path]:
    numbers = make_numbers(tmp_path / "numbers", name)
    tensors = load_file(numbers / "model.safetensors")
    return write_numbers(tmp_path / "some.gguf", numbers, name, tensors, kind, edit), numbers


def loaded(file: Path, **values: Any) -> Loaded:
    told = {"model": prepared_folder(file), "device": "cpu", "kv_cache_memory_bytes": 4 << 20}
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


@pytest.mark.parametrize(
    "name",
    [name if name in _FIRST else pytest.param(name, marks=pytest.mark.full) for name in MADE],
)
def test_a_file_says_what_the_checkpoint_says_that_it_was_made_of(
    tmp_path: Path, name: str
) -> None:
    file, numbers = made(tmp_path, name)
    # Of Phi-3 with two sets of factors those of short texts, as transformers takes for such prompts.
    longest = {"max_model_len": 64} if name == "phi3" else {}
    found = log_probabilities(loaded(file, dtype="float32", **longest))
    assert torch.allclose(found, expected_of(numbers), atol=1e-4)


def test_codes_stay_codes_in_layers_by_the_code_of_transformers(tmp_path: Path) -> None:
    file, numbers = made(tmp_path, "gemma2", Kind.Q8_0)
    stored = load_file(numbers / "model.safetensors")
    for name, rows in stored.items():
        if rows.ndim > 1:
            codes = gguf.quantize(rows.numpy(), Kind.Q8_0)
            stored[name] = torch.from_numpy(gguf.dequantize(codes, Kind.Q8_0))
    save_file(stored, numbers / "model.safetensors", {"format": "pt"})
    with capture_logs() as logs:
        one = loaded(file)
    assert torch.allclose(log_probabilities(one), expected_of(numbers), atol=2e-2)
    [line] = [line for line in logs if line["event"] == "quantized weights"]
    assert line["scheme"] == "of the checkpoint"


@pytest.mark.parametrize(
    ("name", "key", "value", "why"),
    [
        ("gemma2", "attention.sliding_window", 0, r"gemma2\.attention\.sliding_window is 0"),
        ("gemma2", "attn_logit_softcapping", -1.0, r"gemma2\.attn_logit_softcapping is -1"),
        ("gemma2", "attention.sliding_window_pattern", [True], r"pattern is a list of 1 and has"),
        ("gemma3", "rope.freq_base_swa", 0.0, r"gemma3\.rope\.freq_base_swa is 0"),
        ("phi3", "rope.scaling.attn_factor", "x", r"phi3\.rope\.scaling\.attn_factor is 'x'"),
        ("mixtral", "expert_used_count", -2, r"llama\.expert_used_count is -2"),
        ("mixtral", "expert_count", 3, r"ffn_\w+\.weight is \[4, .*\], and by its keys \[3, "),
        ("gptneox", "use_parallel_residual", 1, r"gptneox\.use_parallel_residual is 1"),
        ("granite", "embedding_scale", float("nan"), r"granite\.embedding_scale is nan"),
        ("granite", "final_logit_softcapping", 3.0, r"final_logit_softcapping is not supported"),
        ("chatglm", "rope.dimension_count", 7, r"rope\.dimension_count is 7, and heads have 16"),
        ("chatglm", "attention.head_count", 1 << 40, r"attention\.head_count is 1099511627776"),
    ],
)
def test_keys_that_make_no_sense_are_refused_by_their_name(
    tmp_path: Path, name: str, key: str, value: Any, why: str
) -> None:
    def edit(writer: GGUFWriter) -> None:
        full = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(full, None)
        types = {float: "float32", str: "string", list: "array", int: "int64"}
        getattr(writer, f"add_{types[type(value)]}")(full, value)

    file, _ = made(tmp_path, name, edit=edit)
    with pytest.raises(InvalidRequest, match=why):
        prepared_folder(file)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("chatglm", "blk.0.attn_qkv.bias", r"blk\.0\.attn_qkv\.bias is \[3\], and by its keys"),
        ("gemma2", "blk.1.post_ffw_norm.weight", r"post_ffw_norm\.weight is \[3\], and by its"),
        ("phi3", "rope_factors_long.weight", r"rope_factors_long\.weight is F32 \[3\] and has to"),
        ("mixtral", "blk.0.ffn_gate_inp.weight", r"ffn_gate_inp\.weight is \[3\], and by its"),
    ],
)
def test_tensors_of_another_shape_are_refused_by_their_name(
    tmp_path: Path, name: str, tensor: str, why: str
) -> None:
    def edit(writer: GGUFWriter) -> None:
        del writer.tensors[0][tensor]
        writer.add_tensor(tensor, torch.ones(3).numpy())

    file, _ = made(tmp_path, name, edit=edit)
    with pytest.raises(InvalidRequest, match=why):
        prepared_folder(file)
