"""`tessera convert flm --keep-codes`: layers of 8 and 4 bits are served as the codes that FastLLM wrote."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.decoder.models.llama import Llama
from services.families.check import Parts, require_servable
from shared.checkpoint.folder import Checkpoint
from tests.decoder.loading.test_quantization import loaded_with, log_probabilities
from tests.shared.checkpoint.test_flm import SOME, run
from tests.support import flm
from tests.support.checkpoints import make_checkpoint
from tests.support.flm import Flm, FlmTensorFile

# How much fewer bytes than in float32, scales and zero points included.
KINDS = {flm.INT8: 3, flm.INT4: 5, flm.INT4_NO_ZERO: 5, flm.INT4_GROUP: 4}
GROUP = 32


def written(folder: Path, kind: int) -> Path:
    """A small Llama whose matrices are of this kind, the embedding in float32 and the head of 8 bits."""
    dense = make_checkpoint(folder / "made", "llama")
    tensors: dict[str, FlmTensorFile] = {}
    for name, values in load_file(dense / "model.safetensors").items():
        is_layer = values.ndim == 2 and "embed" not in name
        chosen = flm.INT8 if name == "lm_head.weight" else kind if is_layer else flm.FLOAT32
        tensors[name] = flm.tensor(values.float().numpy(), chosen, width=GROUP)
    config = json.loads((dense / "config.json").read_text())
    config |= {f"rope_scaling.{key}": value for key, value in config["rope_parameters"].items()}
    pairs = {k: str(v) for k, v in config.items() if not isinstance(v, dict | list)}
    pairs |= {"model_type": "llama", "tokenizer_use_score": "1"}
    return Flm(pairs, SOME, tensors).write(folder / "m.flm")


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stay_as_they_are(tmp_path: Path, kind: int) -> None:
    source = written(tmp_path, kind)
    assert run(source, tmp_path / "codes", "--keep-codes", "--dtype", "float32") == 0
    assert run(source, tmp_path / "numbers", "--dtype", "float32") == 0
    require_servable(tmp_path / "codes", parts=Parts.WEIGHTS, device="cpu")
    weights = Llama._weights(Checkpoint(tmp_path / "codes"))
    numbers = load_file(tmp_path / "numbers" / "model.safetensors")
    stored = 0
    for name, expected in numbers.items():
        if not name.endswith("_proj.weight"):
            continue
        layer = name.removeprefix("model.").removesuffix(".weight")
        codes = weights.take_linear(layer, *expected.shape).quantized()
        assert codes is not None and codes.zeros is not None
        assert (codes.bits, codes.group) == (
            8 if kind == flm.INT8 else 4,
            GROUP if kind == flm.INT4_GROUP else 0,
        )
        assert torch.equal(codes.dequantize(torch.float32), expected)
        stored += sum(part.nbytes for part in (codes.codes, codes.scales, codes.zeros))
    whole = sum(value.nbytes for name, value in numbers.items() if name.endswith("_proj.weight"))
    assert stored * KINDS[kind] < whole
    # The embedding's rows are read from the file as they are asked for.
    table = weights.take("embed_tokens.weight", *numbers["model.embed_tokens.weight"].shape)
    assert torch.equal(table, numbers["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", [flm.INT8, flm.INT4_GROUP])
def test_a_decoder_says_what_the_numbers_say(tmp_path: Path, kind: int) -> None:
    source = written(tmp_path, kind)
    assert run(source, tmp_path / "codes", "--dtype", "float32", "--keep-codes") == 0
    assert run(source, tmp_path / "numbers", "--dtype", "float32") == 0
    codes, numbers = (
        log_probabilities(loaded_with(tmp_path / name, "auto", dtype="float32"))
        for name in ("codes", "numbers")
    )
    # Activations have 14 bits where weights are codes.
    assert torch.allclose(codes, numbers, atol=2e-2)
