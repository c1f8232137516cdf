"""How long it takes to move a block between device and host."""

_DECAY = 0.98  # weight of a step that lies one step back


class MoveTimer:
    """Least squares of a step's preparation over the blocks that it moves, with fading memory."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._blocks = 0.0
        self._time = 0.0
        self._blocks_squared = 0.0
        self._product = 0.0

    def observe(self, blocks: int, time: float) -> None:
        """A step that moved so many blocks was prepared in that time, in whatever unit."""
        self._weight = self._weight * _DECAY + 1
        self._blocks = self._blocks * _DECAY + blocks
        self._time = self._time * _DECAY + time
        self._blocks_squared = self._blocks_squared * _DECAY + blocks * blocks
        self._product = self._product * _DECAY + blocks * time

    @property
    def is_begun(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0

    @property
    def of_block(self) -> float:
        """Time of one more block; 0 as long as all steps were alike."""
        if not self._weight:
            return 0.0
        mean = self._blocks / self._weight
        spread = self._blocks_squared / self._weight - mean**2
        if spread <= 1e-9 * max(1.0, mean**2):
            return 0.0
        product = self._product / self._weight - mean * self._time / self._weight
        return max(0.0, product / spread)
