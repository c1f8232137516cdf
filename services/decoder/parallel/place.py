"""What a process has to know to be one of several ranks. Needs no torch: ranks start while the first one imports it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.decoder.settings import DecoderSettings
from shared.hardware import processors


@dataclass(frozen=True)
class Place:
    """Number `rank` of `size`: its settings, by which file it finds the others, and on which CPUs it computes; none
    given: on any. That of settings alone is the place of a process without others."""

    settings: DecoderSettings
    rank: int = 0
    size: int = 1
    meeting: Path | None = None
    cpus: tuple[int, ...] = ()

    @classmethod
    def among(cls, settings: DecoderSettings, rank: int, meeting: Path) -> Self:
        """One of `--tensor-parallel-size`, each on an equal part of this machine's cores; where each would get a single
        one, which other services need too, on any."""
        size = settings.tensor_parallel_size
        shares = processors.shares(size)
        return cls(settings, rank, size, meeting, shares[rank] if shares else ())

    def threads(self, is_small: bool) -> int:
        """How many compute, of those of all ranks together; called before the process keeps to its CPUs. 0: as the
        device has it. is_small: see `Checkpoint.is_small`."""
        if self.size == 1:
            return self.settings.threads
        everywhere = self.settings.threads or (1 if is_small else processors.threads())
        return max(1, everywhere // self.size)

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(
            {
                "settings": self.settings.model_dump(mode="json", exclude_unset=True),
                "rank": self.rank,
                "size": self.size,
                "meeting": str(self.meeting),
                "cpus": self.cpus,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """In the process of the rank."""
        found: dict[str, Any] = json.loads(text)
        settings = DecoderSettings.model_validate(found["settings"])
        meeting, cpus = Path(found["meeting"]), tuple(found["cpus"])
        return cls(settings, found["rank"], found["size"], meeting, cpus)
