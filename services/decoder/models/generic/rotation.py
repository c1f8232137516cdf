"""Rotary frequencies that transformers chooses by the length of the running text are chosen once: a batch holds many
texts, and a cache is shared between them."""

from typing import Any

import torch

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported


def fix_rotations(checkpoint: Checkpoint, model: Any, max_model_len: int) -> None:
    """For texts of `max_model_len` tokens: "longrope" keeps the factors of that length for all.

    Raises InvalidRequest for "dynamic", whose frequencies go on changing, where texts may be that long.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(checkpoint, module, kinds, max_model_len)
        elif isinstance(kinds, dict):
            module.rope_type = {
                layer: _fixed(checkpoint, module, kind, max_model_len, layer)
                for layer, kind in kinds.items()
            }


def _fixed(
    checkpoint: Checkpoint, module: Any, kind: str, max_model_len: int, layer: str | None = None
) -> str:
    """What the module is to take for its kind from now on; one that it does not know changes nothing."""
    if "dynamic" in kind:
        longest = int(module.config.max_position_embeddings)
        if max_model_len > longest:
            raise unsupported(
                checkpoint,
                f"its rotation changes with the length of a text beyond {longest} tokens: give"
                f" --max-model-len {longest}",
            )
        return kind
    if kind != "longrope":
        return kind
    some = next(module.buffers())
    last = torch.tensor([[max_model_len - 1]], device=some.device)
    options = {} if layer is None else {"layer_type": layer}
    with torch.no_grad():
        module(torch.zeros(1, 1, 1, device=some.device), last, **options)
    return "default"
