"""How a model is refused that cannot be served, and an option of one of its files that is not."""

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest


def unsupported(checkpoint: Checkpoint, why: str) -> InvalidRequest:
    """The refusal of a model."""
    return InvalidRequest(
        "UNSUPPORTED_MODEL",
        f"{checkpoint.folder}: {checkpoint.kind} cannot be served: {why}",
        field="model",
    )


def bad_option(checkpoint: Checkpoint, what: str, file: str = "config.json") -> InvalidRequest:
    """The refusal of an option in one of the checkpoint's files; `what` names it."""
    return InvalidRequest(
        "UNSUPPORTED_CONFIG", f"{checkpoint.folder / file}: {what}", field="model"
    )
