"""Families by the architecture that config.json names. A new family is a file here and a line below."""

from dataclasses import dataclass
from typing import Any, Protocol

from services.preprocess.models import llava, llava_next, qwen2_vl
from services.preprocess.models.prompt_rule import ImageProcessing, MediaSpan, PromptRule
from services.preprocess.models.text import TextRule
from shared.checkpoint.folder import Checkpoint
from shared.model_config.families import has_vision


class _Maker(Protocol):
    def __call__(
        self, checkpoint: Checkpoint, processing: ImageProcessing, marker: str
    ) -> PromptRule: ...


class _MarkerId(Protocol):
    def __call__(self, config: dict[str, Any]) -> int: ...


@dataclass(frozen=True)
class Family:
    """A family with images: which token marks an image, and the rule that expands it."""

    image_token_id: _MarkerId
    rule: _Maker


FAMILIES: dict[str, Family] = {
    "LlavaForConditionalGeneration": Family(llava.image_token_id, llava.LlavaRule),
    "LlavaNextForConditionalGeneration": Family(llava.image_token_id, llava_next.LlavaNextRule),
    "Qwen2VLForConditionalGeneration": Family(qwen2_vl.image_token_id, qwen2_vl.Qwen2VLRule),
    "Qwen2_5_VLForConditionalGeneration": Family(qwen2_vl.image_token_id, qwen2_vl.Qwen2VLRule),
}


def find_family(checkpoint: Checkpoint) -> Family | None:
    """The family of a checkpoint; None for a text-only model. Raises InvalidRequest for an unknown one."""
    return FAMILIES[checkpoint.architecture] if has_vision(checkpoint) else None


__all__ = ["Family", "ImageProcessing", "MediaSpan", "PromptRule", "TextRule", "find_family"]
