"""How long a step takes: a running fit of (fixed + per token) time."""

_DECAY = 0.98  # weight of a step that lies one step back


class StepTimer:
    """Least squares of time over tokens (or blocks) with fading memory, in whatever unit the times are observed."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_squared = 0.0
        self._product = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of that many tokens took that long."""
        self._weight = self._weight * _DECAY + 1
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        self._tokens_squared = self._tokens_squared * _DECAY + tokens * tokens
        self._product = self._product * _DECAY + tokens * seconds

    @property
    def is_begun(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0

    @property
    def slope(self) -> float:
        """Time of one more token; 0 as long as all steps were alike."""
        if not self._weight:
            return 0.0
        mean_tokens = self._tokens / self._weight
        spread = self._tokens_squared / self._weight - mean_tokens**2
        if spread <= 1e-9 * max(1.0, mean_tokens**2):
            return 0.0
        product = self._product / self._weight - mean_tokens * self._seconds / self._weight
        return max(0.0, product / spread)

    def predict(self, tokens: int) -> float:
        """How long a step of that many tokens will take; 0 before anything was observed."""
        if not self._weight:
            return 0.0
        mean_tokens = self._tokens / self._weight
        mean_seconds = self._seconds / self._weight
        return max(0.0, mean_seconds + self.slope * (tokens - mean_tokens))
