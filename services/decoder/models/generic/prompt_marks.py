"""What layers are told of the tokens of a prompt, beside their positions, and of none that is generated."""

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from services.decoder.models.generic.rope_index import Ids, Positions


class PromptMarks:
    """Numbers from 0 on for each token of a prompt, under the names by which the layers take them.

    They travel as further axes of the positions, below 0: a generated token has its index there, which is not, and the
    mark 0 of text.
    """

    def __init__(self, find: Callable[[Ids], Mapping[str, Ids]]) -> None:
        """find: gives the marks [tokens] of a prompt's ids [tokens], by name."""
        self._find = find
        self.names = tuple(find(np.zeros(1, np.int64)))

    def beside(self, positions: Positions, prompt: Ids) -> Positions:
        """Positions [axes + names, tokens] of those [axes, tokens] of a prompt."""
        found = self._find(prompt)
        marks = [-found[name].astype(np.int32) for name in self.names]
        return np.concatenate([positions, np.stack(marks)])

    def split(self, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Positions [axes, T] again, and the layers' inputs [1, T] by name."""
        axes = len(positions) - len(self.names)
        marks = (-positions[axes:]).clamp_min(0)
        return positions[:axes], {
            name: row[None] for name, row in zip(self.names, marks, strict=True)
        }
