"""Which of a step's tokens have which adapter."""

import numpy as np

from services.decoder.worker.inputs.rows import Longs, Rows
from services.decoder.worker.slots.slots import Ints


def adapted_tokens(adapter: Ints, rows: Rows, owners: Longs) -> dict[int, Longs]:
    """By the adapter's number its tokens' places in the batch, ascending. adapter: numbers by slot, 0 for none; owners:
    each token's slot."""
    if not adapter[rows.slot].any():
        return {}
    of_tokens = adapter[owners]
    return {
        number: np.flatnonzero(of_tokens == number)
        for number in np.unique(of_tokens).tolist()
        if number
    }
