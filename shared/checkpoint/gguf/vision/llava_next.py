"""LLaVA 1.6 (LLaVA-NeXT): LLaVA 1.5 whose pictures are shown whole and again as tiles, each line of which ends with a
row of its own. Files have the sizes that tiles may have together, one behind the other.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.checkpoint.gguf.header import GgufHeader
from shared.checkpoint.gguf.vision.llava import Llava
from shared.checkpoint.gguf.vision.tensors import Expected

TILED = "image_grid_pinpoints"
_MERGE, _UNPADDED = "mm_patch_merge_type", "spatial_unpad"
_MOST_SIZES = 256


class LlavaNext(Llava):
    """LLaVA 1.6."""

    class_name = "LlavaNextForConditionalGeneration"
    model_type = "llava_next"
    processor = "LlavaNextImageProcessor"

    def __init__(self, header: GgufHeader) -> None:
        super().__init__(header)
        flat = self.keys.wholes(TILED)
        if not flat or len(flat) % 2 or len(flat) > _MOST_SIZES:
            raise header.refusal(f"clip.vision.{TILED} has {len(flat)} numbers, which are no sizes")
        if any(edge < 1 or edge % self.side for edge in flat):
            raise header.refusal(
                f"clip.vision.{TILED} has an edge that is no multiple of {self.side} pixels"
            )
        self._sizes = [list(size) for size in zip(flat[::2], flat[1::2], strict=True)]
        said = header.metadata.get(f"clip.vision.{_MERGE}")
        if said != _UNPADDED:
            raise header.refusal(f"clip.vision.{_MERGE} is {said!r}; {_UNPADDED} is read")

    def config(self, text: dict[str, Any], language: GgufHeader, folder: Path) -> dict[str, Any]:
        """See `Projector`."""
        return {**super().config(text, language, folder), TILED: self._sizes}

    def images(self) -> dict[str, Any]:
        """See `Projector`."""
        return {**super().images(), TILED: self._sizes, "do_pad": True}

    def template(self, given: str | None) -> str | None:
        """See `Projector`: its language models write conversations in several ways."""
        return None

    def expected(self) -> Iterator[Expected]:
        """See `Llava`."""
        yield from super().expected()
        yield Expected("image_newline", (self.text_size,), ("model.image_newline",))
