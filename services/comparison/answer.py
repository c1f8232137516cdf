"""How a program of a comparison says why a checkpoint is refused: one JSON object for its parent, or nothing."""

import json
from collections.abc import Callable

from shared.child_process.answer_file import write_answer
from shared.errors import ServingError


def say_refusal(number: int, work: Callable[[], object]) -> None:
    """Does the work and says why it was refused. `number`: of the parent's `AnswerFile`."""
    try:
        work()
    except ServingError as error:
        said = {"reason": error.reason, "message": error.message}
        write_answer(number, json.dumps(said))
