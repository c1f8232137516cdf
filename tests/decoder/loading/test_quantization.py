"""Decoders whose layers become codes while they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs

from services.decoder.loading.load import Loaded, load
from services.decoder.settings import DecoderSettings
from services.families.check import Parts, require_servable
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.weights.scheme import NONE, SCHEMES
from tests.support.decoder.prompts_step import run_prompts
from tests.support.decoder.step_stream import greedy, read_floats

# How far a log-probability may be off for a small random model, whose logits are large: by the bits of a weight.
TOLERANCE = {8: 0.15, 4: 1.5}


def loaded_with(folder: Path, quantization: str, **changes: Any) -> Loaded:
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    changes["quantization"] = quantization
    return load(DecoderSettings.model_validate({**values, **changes}))


def log_probabilities(loaded: Loaded) -> torch.Tensor:
    return torch.tensor(read_floats(run_prompts(loaded.worker, greedy(logprobs=0)).logprobs))


def test_a_decoder_of_codes_says_what_a_dense_one_says(llama_folder: Path) -> None:
    dense = loaded_with(llama_folder, NONE)
    expected, fingerprints = log_probabilities(dense), {dense.fingerprint}
    for name, scheme in SCHEMES.items():
        if name in ("int4g32", "int4g256"):  # the same as others for so small a model
            continue
        with capture_logs() as logs:
            loaded = loaded_with(llama_folder, name)
        [line] = [line for line in logs if line["event"] == "quantized weights"]
        assert (line["scheme"], line["layers"]) == (name, 9)  # four of each layer, and the head
        assert loaded.row_invariant and loaded.content == dense.content
        off = (log_probabilities(loaded) - expected).abs().max()
        assert 0 < off < TOLERANCE[scheme.bits], name
        fingerprints.add(loaded.fingerprint)
    assert len(fingerprints) == 1 + 6


def test_what_cannot_be_quantized_is_refused_by_its_flag(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="int3"):
        loaded_with(llama_folder, "int3")
    told: dict[str, Any] = {"parts": Parts.WEIGHTS, "device": "cpu", "quantization": "int8"}
    require_servable(llama_folder, **told)
    foreign = ModelBackend.TRANSFORMERS
    with pytest.raises(InvalidRequest, match="--quantization int8: the code of transformers runs"):
        require_servable(llama_folder, backend=foreign, **told)
    with pytest.raises(InvalidRequest, match="--quantization int8: the code of transformers runs"):
        loaded_with(llama_folder, "int8", model_backend=foreign)
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", "none")
    with pytest.raises(InvalidRequest, match="the CPU kernels are needed"):
        loaded_with(llama_folder, "int8", threads=3)
