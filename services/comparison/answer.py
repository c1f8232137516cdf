"""How a program of a comparison says why a checkpoint is refused: one JSON object on its output, or nothing."""

import json
import os
from collections.abc import Callable

from shared.errors import ServingError


def say_refusal(work: Callable[[], object]) -> None:
    """Does the work and prints why it was refused. What libraries and logs print meanwhile goes to the errors."""
    sink = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        work()
    except ServingError as error:
        sink.write(json.dumps({"reason": error.reason, "message": error.message}))
    sink.close()
