"""Qwen2.5-VL."""

from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from tests.support.checkpoints import qwen2_vl
from tests.support.checkpoints.options import CheckpointOptions

inputs = qwen2_vl.inputs
respelt = qwen2_vl.respelt


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[Qwen2_5_VLForConditionalGeneration, qwen2_vl.Parts]:
    """The model, not yet randomised, and what its folder needs beside it."""
    return qwen2_vl.build(chosen, words, newer=True)
