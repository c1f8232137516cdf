"""What a process has to know to be one of several ranks."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from services.decoder.parallel.share import Share
from services.decoder.settings import DecoderSettings
from shared import processors


@dataclass(frozen=True)
class Place:
    """One rank's: its settings, by which file it finds the others, and on which CPUs it computes; none given: on any.
    That of settings alone is the place of a process without others."""

    settings: DecoderSettings
    share: Share = field(default_factory=Share)
    meeting: Path | None = None
    cpus: tuple[int, ...] = ()

    @classmethod
    def first(cls, settings: DecoderSettings, meeting: Path, is_small: bool) -> Self:
        """Of this process; threads that compute are divided among ranks. is_small: see `Checkpoint.is_small`."""
        size = settings.tensor_parallel_size
        threads = settings.threads or (1 if is_small else processors.threads())
        settings = settings.model_copy(update={"threads": max(1, threads // size)})
        return cls(settings, Share(0, size), meeting, _cpus(0, size))

    def other(self, rank: int) -> Self:
        """That of another rank."""
        size = self.share.size
        return replace(self, share=Share(rank, size), cpus=_cpus(rank, size))

    def to_json(self) -> str:
        """For `from_json`."""
        settings = self.settings.model_dump(mode="json", exclude_unset=True)
        content = {"share": asdict(self.share), "meeting": str(self.meeting), "cpus": self.cpus}
        return json.dumps({"settings": settings, **content})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """In the process of the rank."""
        content: dict[str, Any] = json.loads(text)
        return cls(
            DecoderSettings.model_validate(content["settings"]),
            Share(**content["share"]),
            Path(content["meeting"]),
            tuple(content["cpus"]),
        )


def _cpus(rank: int, size: int) -> tuple[int, ...]:
    """An equal part of this machine's cores, neighbours of one socket; none where a rank would be tied to one core,
    which others use too."""
    shares = processors.shares(size)
    return shares[rank] if shares else ()
