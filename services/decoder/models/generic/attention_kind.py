"""How far the tokens of media see, measured: what a class makes of a text in which it is told that some are media."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.generic.attention import NotServed
from services.decoder.models.generic.comparison import agree, short_reaches
from services.decoder.models.generic.head import in_vocabulary
from services.decoder.models.generic.trial_run import TrialRun
from services.decoder.steps.needs import AttentionKind

_LENGTH = 23
# Where a prompt may have two, whether they see each other is a part of the question.
_IMAGES = ((4, 9), (13, 17))
_TYPES = ("token_type_ids", "mm_token_type_ids")  # as classes call them; 0 is text


def run_marked(model: Any, axes: int, most: int) -> tuple[list[int], Tensor] | None:
    """A text and its logits [n, vocabulary] by the class's own attention, with two stretches of it marked as images, or
    as many as a prompt may have (`most`).

    None for classes that take no marks, and for those that want to see the images too: they read no mask from marks.
    """
    names = [name for name in _TYPES if name in inspect.signature(model.forward).parameters]
    if not names:
        return None
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    device = next(model.parameters()).device
    ids = torch.arange(_LENGTH, device=device)[None] * 7 % (vocabulary - 1) + 1
    types = torch.zeros_like(ids)
    for first, end in _IMAGES[:most]:
        types[:, first:end] = 1
    given = {"input_ids": ids, "use_cache": False, **dict.fromkeys(names, types)}
    if axes:  # else the class would compute them from the images
        given["position_ids"] = torch.arange(_LENGTH, device=device).expand(axes, 1, -1)
    try:
        with short_reaches(model):
            logits = model(**given).logits[0]
    except (TypeError, ValueError, AttributeError, RuntimeError, StopIteration):
        return None
    known = len(model.get_input_embeddings().weight)
    return ids[0].tolist(), in_vocabulary(logits.float(), known)


def attention_kind(
    decoder: DecoderModel,
    layers: Any,
    ops: BaseOps,
    marked: tuple[Sequence[int], Tensor] | None,
    most: int,
) -> AttentionKind:
    """The kind by which the decoder gives the same; `most`: see `run_marked`. Raises NotServed where none does."""
    if marked is None:
        return AttentionKind.CAUSAL
    prompt, expected = marked
    spans = {
        AttentionKind.CAUSAL: [],
        AttentionKind.BIDIRECTIONAL_MEDIA: [(0, *image) for image in _IMAGES[:most]],
        AttentionKind.PREFIX_LM: [(0, 0, _LENGTH)],
    }
    with short_reaches(layers):
        for kind, seen_whole in spans.items():
            [found] = TrialRun(decoder, ops, [prompt], seen_whole).logits([[_LENGTH]])
            if agree(found, expected, ops.dtype):
                return kind
    raise NotServed("how the tokens of its images see each other is not known here")
