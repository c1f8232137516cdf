"""Attention that an Ascend 310P has no operator for, as far as a model's files tell; what they do not tell is refused
when the model is loaded."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest

_LARGEST_HEAD = 256  # elements
_WITH_SINKS = frozenset({"gpt_oss"})


def require_narrow(checkpoint: Checkpoint) -> None:
    """Raises InvalidRequest naming what there is not."""
    if refused := _refused(checkpoint.text_config):
        raise InvalidRequest(
            "UNSUPPORTED_MODEL",
            f"{checkpoint.kind}: attention with {refused} is not served on an Ascend 310P: use a 910B",
            field="model",
        )


def _refused(text: Mapping[str, Any]) -> str:
    heads = text.get("num_attention_heads") or 1
    size = text.get("head_dim") or (text.get("hidden_size") or 0) // heads
    if size > _LARGEST_HEAD:
        return f"heads of {size} elements, which are more than {_LARGEST_HEAD},"
    if text.get("attn_logit_softcapping"):
        return "a soft cap"
    if text.get("attention_chunk_size"):
        return "chunks"
    return "sinks" if text.get("model_type") in _WITH_SINKS else ""
