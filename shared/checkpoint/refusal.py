"""How a model is refused that cannot be served."""

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest


def unsupported(checkpoint: Checkpoint, why: str) -> InvalidRequest:
    """The refusal of a model."""
    return InvalidRequest(
        "UNSUPPORTED_MODEL",
        f"{checkpoint.folder}: {checkpoint.kind} cannot be served: {why}",
        field="model",
    )
