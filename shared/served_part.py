"""What a running service says of the part of the model that it serves."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ServedPart:
    """`code`: "native", or whose code runs it. `off`: what it does without. `largest_difference`: between its outputs
    and those of the model's own class, in standard deviations, where that was measured at start. `ranks`: how many
    processes compute it together, where there are several."""

    code: str
    off: tuple[str, ...] = ()
    largest_difference: float | None = None
    ranks: int | None = None

    @property
    def content(self) -> dict[str, Any]:
        """As JSON has it; without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def log_fields(self) -> dict[str, Any]:
        """The same as log lines have it: what it does without as one text, and not at all where that is nothing."""
        fields = {name: value for name, value in self.content.items() if value != ()}
        return fields | ({"off": ", ".join(self.off)} if self.off else {})

    def to_json(self) -> str:
        """For the registry."""
        return json.dumps(self.content)
