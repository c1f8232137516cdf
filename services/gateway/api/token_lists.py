"""Long lists of tokens in JSON, piece by piece."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_SLICE = 2048


def listed(ids: npt.NDArray[np.integer[Any]], written: Callable[[int], str]) -> Iterator[str]:
    """The elements of a JSON list of `ids` (`[n]`), each as `written` has it, with the commas between them."""
    for start in range(0, len(ids), _SLICE):
        some = ids[start : start + _SLICE].tolist()
        yield ("," if start else "") + ",".join(map(written, some))
