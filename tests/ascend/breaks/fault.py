"""One way to break the code."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DECODER, ENCODER = "services/decoder", "services/vision_encoder"


@dataclass(frozen=True)
class Break:
    """In `file` the text `old`, which is there once, becomes `new`. `reason`: what is wrong then, and the name of the
    entry; `tests`: those that notice it, as pytest takes them, in tests/ascend."""

    reason: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def broken(self, text: str) -> str:
        """The text of the file with the fault. Raises ValueError where the old text is not there, or more than once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.reason}: {self.file} has {self.old!r} {found} times, not once")
        return text.replace(self.old, self.new)

    @property
    def module(self) -> str:
        """The file as it is imported."""
        return self.file.removesuffix(".py").replace("/", ".")
