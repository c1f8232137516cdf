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
    others; `state`: something lies outside the blocks of the cache."""

    attention: AttentionKind = AttentionKind.CAUSAL
    whole_prompt: bool = False
    state: bool = False

    @property
    def off(self) -> list[str]:
        """What a decoder with these needs does without."""
        alone = ["prefix reuse"] if self.whole_prompt or self.state else []
        return [*alone, "swapping"] if self.state else alone

    def require_served(self) -> None:
        """Raises InvalidRequest for state outside the blocks."""
        if self.state:
            raise InvalidRequest(
                "UNSUPPORTED_MODEL",
                "the model needs what is not served: state is kept outside the cache's blocks",
                field="model",
            )
