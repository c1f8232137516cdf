"""When the stages of a request were, by the gateway's clock."""

from dataclasses import dataclass

from shared.environment import monotonic


@dataclass(slots=True)
class Timeline:
    """Moments of the monotonic clock, in seconds; 0 for what has not been. `queue_s` is what the scheduler says of the
    time from admission to a decoder: None where it is not known.
    """

    arrived: float
    admitted: float
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    queue_s: float | None = None

    @property
    def prepare_s(self) -> float:
        """From arrival to admission."""
        return max(0.0, self.admitted - self.arrived)

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token."""
        return self.first_token - self.arrived if self.first_token else None

    @property
    def prefill_s(self) -> float | None:
        """From a decoder to the first token."""
        if not self.first_token or self.queue_s is None:
            return None
        return max(0.0, self.first_token - self.admitted - self.queue_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return self.last_token - self.first_token if self.first_token else None

    @property
    def total_s(self) -> float:
        """From arrival to the end, or until now."""
        return (self.ended or monotonic()) - self.arrived
