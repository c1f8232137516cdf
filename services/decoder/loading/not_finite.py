"""Why a model's output is not finite: a damaged tensor of the checkpoint, or numbers beyond the type it computes in."""

import torch

from shared.checkpoint.files import GGUF
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.gguf.architecture import stored_name
from shared.checkpoint.gguf.block_types import CODED
from shared.errors import InvalidRequest
from shared.weights.layouts.layout import NOT_FINITE
from shared.weights.readers.gguf import read_numbers

_AT_ONCE = 1 << 24  # elements
_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def not_finite(checkpoint: Checkpoint, dtype: torch.dtype) -> InvalidRequest:
    """The refusal of a model whose first step gave no numbers. Reads its tensors, which takes as long as loading."""
    name = next((name for name in checkpoint.names() if not _is_finite(checkpoint, name)), None)
    if name is not None:
        is_stored = checkpoint.file_of(name) == GGUF
        shown = stored_name(checkpoint.folder / GGUF, name) if is_stored else name
        why = f"the tensor {shown} cannot be used: {NOT_FINITE}; download it again"
        return _refusal(checkpoint, why)
    kind = str(dtype).removeprefix("torch.")
    why = (
        f"{checkpoint.kind} gives no finite numbers in {kind}, though each of its tensors is finite"
    )
    if dtype == torch.float32:
        return _refusal(checkpoint, f"{why}: they are damaged, or those of another model")
    return _refusal(checkpoint, f"{why}: give --dtype float32")


def _refusal(checkpoint: Checkpoint, why: str) -> InvalidRequest:
    return InvalidRequest("UNSUPPORTED_WEIGHTS", f"{checkpoint.origin}: {why}", field="model")


def _is_finite(checkpoint: Checkpoint, name: str) -> bool:
    kind = checkpoint.dtype(name)
    if kind not in _NUMBERS and kind not in CODED:
        return True
    stored = checkpoint.tensor(name)
    rows = stored.flatten(0, -2) if stored.ndim > 1 else stored.view(1, -1)
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for part in rows.split(step):
        numbers = read_numbers(kind, part) if kind in CODED else part.float()
        if not bool(numbers.isfinite().all()):
            return False
    return True
