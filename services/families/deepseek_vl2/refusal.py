"""How options of config.json are refused that are not served."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option


def require(
    checkpoint: Checkpoint, part: str, values: Mapping[str, Any], only: Mapping[str, Any]
) -> None:
    """Raises InvalidRequest naming the first key of a part whose value is not the only one that is served."""
    for key, served in only.items():
        if values.get(key, served) != served:
            name = f"{part}.{key}" if part else key
            raise bad_option(checkpoint, f"{name} {values[key]!r}; only {served!r} is served")
