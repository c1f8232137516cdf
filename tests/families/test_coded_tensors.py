"""Quantized checkpoints with tensors that make no weight are refused by their headers, before anything is started."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.families.check import require_servable
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.coded import Coded, edit_quantization, write_coded

AWQ = Coded("awq")
GPTQ = Coded("gptq")
SYMMETRIC = Coded("gptq", symmetric=True)
ORDERED = Coded("gptq", ordered=True)
PACKED = Coded("pack-quantized", symmetric=True)
BYTES = Coded("int-quantized", bits=8, group=0, symmetric=True)
Tensors = dict[str, Tensor]
LAYER = "model.layers.1.self_attn.k_proj"


def removed(*parts: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for part in parts:
            del tensors[f"{LAYER}.{part}"]

    return change


def replaced(part: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"] = make(tensors[f"{LAYER}.{part}"]).contiguous()

    return change


def nothing(tensors: Tensors) -> None:
    pass


def as_numbers(tensors: Tensors) -> None:
    removed("qweight", "qzeros", "scales")(tensors)
    tensors[f"{LAYER}.weight"] = torch.zeros(32, 64)


FAULTS: list[tuple[Coded, Callable[[Tensors], None], dict[str, Any], str]] = [
    (AWQ, removed("scales"), {}, r"k_proj\.scales cannot be used: the checkpoint lacks it"),
    (GPTQ, removed("qzeros"), {}, r"k_proj\.qzeros cannot be used: the checkpoint lacks it"),
    (BYTES, removed("weight_scale"), {}, r"k_proj\.weight_scale .* lacks it"),
    (GPTQ, replaced("scales", Tensor.double), {}, r"k_proj\.scales .*: it is F64 .*has to be F16"),
    (PACKED, replaced("weight_packed", Tensor.long), {}, r"weight_packed .*: it is I64"),
    # Zeros in bytes, and zeros that are packed along the other axis.
    (AWQ, replaced("qzeros", Tensor.byte), {}, r"k_proj\.qzeros cannot be used: it is U8"),
    (AWQ, replaced("qzeros", lambda t: t.T), {}, r"k_proj\.qzeros .*: it is I32 \[4, 2\]"),
    (SYMMETRIC, replaced("qzeros", lambda t: t + 1), {}, r"k_proj\.qzeros .* not in the middle"),
    (GPTQ, nothing, {"group_size": 64}, r"\.qweight .* do not divide into groups of 64"),
    (AWQ, nothing, {"group_size": 48}, r"\.qzeros .*: it is I32 \[3, 8\]"),
    (ORDERED, replaced("g_idx", lambda t: t.flip(0)), {}, r"k_proj\.g_idx .* in another order"),
    (ORDERED, replaced("g_idx", torch.zeros_like), {}, r"g_idx .* groups have not 32 inputs each"),
    (AWQ, as_numbers, {}, r"k_proj is not quantized, or not there, and .*q_proj is"),
    (AWQ, removed("qweight", "qzeros", "scales"), {}, r"lacks model\.layers\.1\.self_attn\.k_proj"),
    (
        AWQ,
        lambda tensors: tensors.update(
            {
                f"{LAYER}.{part}": torch.cat([tensors[f"{LAYER}.{part}"]] * 2, 1)
                for part in ("qweight", "qzeros", "scales")
            }
        ),
        {},
        r"k_proj\.qweight .*: config\.json wants \[64, 4\] for 32 outputs and 64 inputs, stored is",
    ),
]


@pytest.mark.parametrize(("how", "change", "config", "said"), FAULTS)
def test_faults_of_tensors_are_refused_by_their_names(
    tmp_path: Path,
    how: Coded,
    change: Callable[[Tensors], None],
    config: dict[str, Any],
    said: str,
) -> None:
    folder = tmp_path / "coded"
    write_coded(folder, make_checkpoint(tmp_path / "dense", "llama"), how)
    require_servable(folder, device="cpu")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_quantization(folder, **config)
    with pytest.raises(InvalidRequest, match=said):
        require_servable(folder, device="cpu")


def test_neither_torch_nor_transformers_is_needed_for_that(tmp_path: Path) -> None:
    folder = tmp_path / "coded"
    write_coded(folder, make_checkpoint(tmp_path / "dense", "llama"), ORDERED)
    program = (
        "import sys\nfrom pathlib import Path\nfrom services.families.check import require_servable\n"
        f"require_servable(Path({str(folder)!r}), device='cpu')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
