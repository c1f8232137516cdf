"""Which tokens of a sequence must be computed in one step."""

from dataclasses import dataclass
from enum import Enum

from services.scheduler.core.sequence import Sequence


class AttentionKind(Enum):
    """How far a token's attention looks (`AttentionKind` in decoder.proto)."""

    CAUSAL = "each token sees what is before it"
    BIDIRECTIONAL_MEDIA = "media spans see themselves whole"
    PREFIX_LM = "the prompt sees itself whole"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of sequences that a model needs whole: media spans, prompts, or all that is not computed yet."""

    attention: AttentionKind = AttentionKind.CAUSAL
    whole_prompt: bool = False

    @property
    def are_media(self) -> bool:
        """Whether they are media spans alone."""
        return self.attention is AttentionKind.BIDIRECTIONAL_MEDIA and not self.whole_prompt

    def at(self, sequence: Sequence, start: int) -> int:
        """Tokens of the part that begins at index `start`; 0 if none does."""
        if self.whole_prompt:
            return sequence.num_tokens - start
        if self.attention is AttentionKind.PREFIX_LM:
            return max(0, sequence.prompt_len - start)
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            return next((span.length for span in sequence.media if span.offset == start), 0)
        return 0

    def chunk(self, sequence: Sequence, start: int, most: int) -> int:
        """Tokens from index `start` on that can be computed in one step: `most` or, so that no part is divided, fewer;
        more than `most` if a longer part begins there."""
        part = self.at(sequence, start)
        if most <= part:
            return part
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            for span in sequence.media:
                if span.offset < start + most < span.end:
                    return span.offset - start
        return most

    def longest(self, sequence: Sequence) -> int:
        """Tokens of the longest part that a sequence will ever have."""
        if self.whole_prompt:
            return sequence.length_limit - 1  # if it is computed again; the last token never is
        if self.attention is AttentionKind.PREFIX_LM:
            return sequence.prompt_len
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            return max((span.length for span in sequence.media), default=0)
        return 0

    def begin(self, sequence: Sequence, start: int, block_size: int) -> int:
        """Where a sequence goes on whose first `start` tokens are cached: there, or at the last block's border before
        it that is in no media span."""
        if self.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            for span in reversed(sequence.media):
                if span.offset < start < span.end:
                    start = span.offset // block_size * block_size
        return start
