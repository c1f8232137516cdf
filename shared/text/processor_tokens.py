"""Special tokens that a model's own processor adds to its tokenizer when it is loaded. Standard library only."""

from collections.abc import Mapping, Sequence
from typing import Any

# DeepSeek-VL2, in the order of `DeepseekVLV2Processor.__init__`, behind those of padding and pictures.
_GROUNDING = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")
_ROLES = ("<|User|>", "<|Assistant|>")
_PAD, _IMAGE = "<｜▁pad▁｜>", "<image>"  # noqa: RUF001


def added_by_processor(
    config: Mapping[str, Any], processor: Mapping[str, Any], has_pad: bool
) -> Sequence[str]:
    """The tokens in their order, also those that the tokenizer has; none for most models. By config.json and
    processor_config.json; `has_pad`: the tokenizer's files name a token of padding."""
    if not all(key in config for key in ("language_config", "projector_config")):
        return ()
    pad = () if has_pad else (str(processor.get("pad_token") or _PAD),)
    return (*pad, str(processor.get("image_token") or _IMAGE), *_GROUNDING, *_ROLES)
