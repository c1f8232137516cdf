"""How many tokens a step may have, by what the model needs whole."""

from dataclasses import dataclass

from services.decoder.steps.needs import AttentionKind, Needs
from services.families import registry
from shared.checkpoint.folder import Checkpoint

_UNKNOWN = 4096  # tokens of an item, where only the processor's code knows how many there may be


@dataclass(frozen=True)
class StepSize:
    """Tokens: of any step, and of one that exceeds this for a row that must not be split."""

    usual: int
    largest: int


def step_size(
    needs: Needs, checkpoint: Checkpoint, usual: int, max_slots: int, max_model_len: int
) -> StepSize:
    """`usual` is what the operator or the device says. The largest step holds the longest row that must not be split,
    and one token for each slot. Raises InvalidRequest for media options that are not served."""
    if needs.whole_prompt:
        usual = max(usual, max_model_len)
    longest = _longest_row(needs, checkpoint, max_model_len)
    return StepSize(usual, max(usual, longest + max_slots) if longest else usual)


def _longest_row(needs: Needs, checkpoint: Checkpoint, max_model_len: int) -> int:
    if needs.whole_prompt or needs.attention is AttentionKind.PREFIX_LM:
        return max_model_len
    family = registry.find(checkpoint)
    if needs.attention is AttentionKind.CAUSAL or not family.takes_media:
        return 0
    sizes = [family.largest(checkpoint, kind).tokens for kind in family.modalities]
    return min(max_model_len, max(tokens or _UNKNOWN for tokens in sizes))
