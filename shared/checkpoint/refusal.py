"""How a model is refused that cannot be served, an option of one of its files that is not, and files that do not fit
each other."""

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


def bad_checkpoint(checkpoint: Checkpoint, what: str) -> InvalidRequest:
    """The refusal of files that cannot be those of one model."""
    return InvalidRequest("BAD_CHECKPOINT", f"{checkpoint.folder}: {what}", field="model")
