"""What all vision parts have: keys, tensors, and what a checkpoint folder has of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from shared.checkpoint.gguf.header import GgufHeader
from shared.checkpoint.gguf.vision.keys import VisionKeys
from shared.checkpoint.gguf.vision.tensors import VisionTensor
from shared.text.cutting import cut

_MOST_LAYERS = 1 << 10


class Projector(ABC):
    """A vision part of one kind. All that is wrong with its file is said, by key or tensor, when it is made."""

    # `general.architecture` of the language models that it may stand before.
    languages: ClassVar[tuple[str, ...]]
    tensors: Mapping[str, VisionTensor]  # by the names of transformers
    text_size: int  # elements of the rows that it makes

    def __init__(self, header: GgufHeader) -> None:
        self.header, self.keys = header, VisionKeys(header)
        self.layers = self.keys.whole("block_count")
        if self.layers > _MOST_LAYERS:
            raise header.refusal(f"clip.vision.block_count is {self.layers:,}")
        self.hidden = self.keys.whole("embedding_length")
        self.heads = self.keys.whole("attention.head_count")
        if self.hidden % self.heads:
            raise header.refusal(
                f"clip.vision.attention.head_count is {self.heads}, which does not divide {self.hidden} elements"
            )
        self.patch = self.keys.whole("patch_size")
        self.mean, self.deviation = self.keys.three("image_mean"), self.keys.three("image_std")
        if min(self.deviation) <= 0:
            raise header.refusal(f"clip.vision.image_std is {self.deviation}")

    @property
    def activation(self) -> str:
        """Of its layers, as transformers calls it."""
        gelu, silu = self.keys.flag("clip.use_gelu"), self.keys.flag("clip.use_silu")
        if gelu and silu:
            raise self.header.refusal("clip.use_gelu and clip.use_silu are both true")
        return "gelu" if gelu else "silu" if silu else "quick_gelu"

    def require_pair(self, language: GgufHeader, size: int, head: int) -> None:
        """Raises InvalidRequest unless it belongs to a language model of `size` elements a token and `head` a head."""
        name = language.metadata.get("general.architecture")
        if name not in self.languages:
            raise self._no_pair(
                language,
                f"stands before {' and '.join(self.languages)}, and {language.path.name} is {cut(repr(name), 40)}",
            )
        if size != self.text_size:
            raise self._no_pair(
                language,
                f"makes rows of {self.text_size} elements, and {language.path.name} takes {size}",
            )

    @abstractmethod
    def config(self, text: dict[str, Any], language: GgufHeader, folder: Path) -> dict[str, Any]:
        """The content of config.json. text: that of the language model alone, whose header is `language`; folder: has
        the tokenizer's files, to which a placeholder is added where they lack one."""

    @abstractmethod
    def images(self) -> dict[str, Any]:
        """The content of preprocessor_config.json."""

    @abstractmethod
    def template(self, given: str | None) -> str | None:
        """The chat template in the place of the file's, which may be none; None leaves that."""

    def _no_pair(self, language: GgufHeader, why: str) -> Exception:
        return self.header.refusal(
            f"it is no vision part of {language.path.name}: it {why}; give the right one, --mmproj FILE, or"
            " --mmproj none to answer to text alone"
        )
