"""The kinds of vision parts that are read, by the type of their projector."""

from collections.abc import Mapping
from pathlib import Path

from shared.checkpoint.gguf.header import GgufHeader, read_header
from shared.checkpoint.gguf.vision.internvl import InternVL
from shared.checkpoint.gguf.vision.keys import VisionKeys
from shared.checkpoint.gguf.vision.llava import Llava
from shared.checkpoint.gguf.vision.llava_next import TILED, LlavaNext
from shared.checkpoint.gguf.vision.projector import Projector
from shared.checkpoint.gguf.vision.qwen_vl import Qwen2_5VL, Qwen2VL
from shared.text.cutting import cut

ARCHITECTURE = "clip"
_LLAVA = "mlp"
_KINDS: Mapping[str, type[Projector]] = {
    _LLAVA: Llava,
    "internvl": InternVL,
    "qwen2vl_merger": Qwen2VL,
    "qwen2.5vl_merger": Qwen2_5VL,
}


def open_projector(path: Path) -> Projector:
    """Raises InvalidRequest, naming key or tensor, for a file that is no vision part, no whole one, or of a kind that
    is not read."""
    header = read_header(path)
    name = header.metadata.get("general.architecture")
    if name != ARCHITECTURE:
        raise header.refusal(
            f"general.architecture is {cut(repr(name), 40)}: it is no vision part (mmproj), which says {ARCHITECTURE}"
        )
    kind = _type(header)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise header.refusal(
            f"clip.projector_type is {cut(repr(kind), 40)}; {', '.join(_KINDS)} are read: --mmproj none answers to text"
            " alone, or serve the checkpoint that it was made of"
        )
    if kind == _LLAVA and VisionKeys(header).has(TILED):
        return LlavaNext(header)
    return _KINDS[kind](header)


def _type(header: GgufHeader) -> object:
    """Of files that hear too, that of their eyes."""
    said = header.metadata
    return said.get("clip.projector_type", said.get("clip.vision.projector_type"))
