"""What packed linear layers are for."""

from enum import Enum, auto


class Use(Enum):
    """Which operation a packed linear layer is for."""

    LINEAR = auto()
    GATE_UP = auto()
    GELU = auto()
    HEAD = auto()
    UNCHANGED = auto()  # stays as it is stored
