"""What a decoder asks of the order in which its tokens are computed."""

from dataclasses import dataclass
from enum import Enum

from shared.errors import InvalidRequest


class AttentionKind(Enum):
    """How far a token's attention looks; the names are those of `AttentionKind` in decoder.proto."""

    CAUSAL = "each token sees what is before it"
    BIDIRECTIONAL_MEDIA = "media spans see themselves whole"
    PREFIX_LM = "the prompt sees itself whole"


@dataclass(frozen=True)
class Needs:
    """`whole_prompt`: what is not computed yet is never split between steps, and nothing of it is taken from blocks of
    others; `state`: something lies outside the blocks of the cache, so that sequences begin at their first token, and
    nothing is swapped out."""

    attention: AttentionKind = AttentionKind.CAUSAL
    whole_prompt: bool = False
    state: bool = False

    @property
    def off(self) -> list[str]:
        """What a decoder with these needs does without."""
        alone = ["prefix reuse"] if self.whole_prompt or self.state else []
        return [*alone, "swapping"] if self.state else alone

    def require_state(self, keeps: bool) -> None:
        """`keeps`: whether layers keep state in slots. Raises InvalidRequest where `state` says something else: other
        sequences would begin in blocks without it."""
        if keeps != self.state:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                f"the model's layers keep {'state' if keeps else 'no state'} outside the cache's blocks, but its needs"
                f" say state={self.state}: a mistake in its decoder class",
                field="model",
            )
