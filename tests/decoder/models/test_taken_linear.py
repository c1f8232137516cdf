"""Linear layers of classes of transformers stay in the checkpoint until they are packed, quantized ones as codes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.generic.decoder import GenericDecoder
from services.decoder.models.generic.linears.taken_linear import TakenLinear
from services.decoder.models.generic.loading import find_class, load_model
from services.decoder.models.generic.trial_run import TrialRun
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import read_config
from shared.weights.linear_weight import as_codes, in_memory
from tests.support.decoder.coded_weights import Form
from tests.support.generic_models import make_generic_checkpoint

TOKENS = [5, 300, 17, 4, 88, 230, 9]
_FORM = Form(group=32, zeros=True, scales=torch.float16)


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    kind, config = find_class(checkpoint, False), read_config(checkpoint)
    return load_model(checkpoint, kind, config, dtype)


def taken(model: Any) -> dict[str, TakenLinear]:
    return {path: part for path, part in model.named_modules() if type(part) is TakenLinear}


@pytest.mark.parametrize(
    ("family", "of_a_layer"),
    [("cohere2", 7), ("gemma2", 7), ("mixtral", 4), ("qwen3_moe", 4), ("gpt_oss", 4)],
)
def test_linear_layers_are_those_that_transformers_loads(
    tmp_path: Path, family: str, of_a_layer: int
) -> None:
    checkpoint = Checkpoint(make_generic_checkpoint(tmp_path, family))
    kind, config = find_class(checkpoint, False), read_config(checkpoint)
    model, whole = load(checkpoint), kind.from_pretrained(checkpoint.folder, config=config)
    found = taken(model)
    assert len([path for path in found if ".layers.0." in path]) == of_a_layer
    for path, layer in found.items():
        assert torch.equal(layer.weight, whole.get_submodule(path).weight)


def test_of_a_layer_that_was_converted_the_numbers_are_kept_and_of_others_none(
    tmp_path: Path,
) -> None:
    checkpoint = Checkpoint(make_generic_checkpoint(tmp_path, "cohere2"))
    wide, narrow = (next(iter(taken(load(checkpoint, dtype)).values())) for dtype in _TYPES)
    assert torch.equal(wide.weight.bfloat16(), narrow.weight)
    assert narrow.weight is narrow.weight
    narrow.taken = as_codes(_FORM.make(narrow.out_features, narrow.in_features))
    narrow.keep(narrow.taken, narrow.bias)
    assert narrow.weight is not narrow.weight


_TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("family", ["cohere2", "qwen3_moe"])
def test_quantized_layers_of_a_class_compute_what_their_numbers_do(
    tmp_path: Path, family: str
) -> None:
    checkpoint = Checkpoint(make_generic_checkpoint(tmp_path, family))
    found = []
    for quantized in (True, False):
        ops = CpuDevice(torch.float32).ops
        model = load(checkpoint)
        for seed, layer in enumerate(taken(model).values()):
            codes = _FORM.make(layer.out_features, layer.in_features, seed)
            dense = in_memory(codes.dequantize(torch.float32))
            layer.keep(as_codes(codes) if quantized else dense, layer.bias)
        # Products of codes take rows in 14 bits, which the class's own forward does not.
        check = not quantized
        decoder: DecoderModel = GenericDecoder.of_class(checkpoint, model, ops, 256, check=check)
        with torch.inference_mode():
            found.append(TrialRun(decoder, ops, [TOKENS]).logits([[4, 1, 2]])[0])
        assert not taken(model)
    assert found[0].isfinite().all()
    assert (found[0] - found[1]).abs().max() < 0.02 * found[1].std()
