"""The process in which forms are compiled, one at a time, within bounds of memory, time and stack.

llguidance compiles by recursion: a long chain of references overflows the stack, which ends the process. What is
compiled here within a small stack can be compiled in a decoder, whose threads have a larger one (measured: with a
tokenizer it takes as much as without).

`python -m services.gateway.reading.structured.worker <most bytes of memory>`
"""

import resource
import sys
from typing import Any

from services.gateway.reading.structured.compiling import compiled
from services.gateway.reading.structured.errors import FormError
from shared.confinement.job_loop import answer_jobs

# A chain of about 100 objects, or 300 rules. Threads have at least two megabytes.
_STACK_BYTES = 1 << 20


def main(memory_bytes: str) -> None:
    """Compiles forms until its input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
    answer_jobs(int(memory_bytes), _done)


def _done(job: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A grammar, or why there is none."""
    try:
        return compiled(job), {}
    except FormError as error:
        told = {
            "at": error.at,
            "field": error.field,
            "message": str(error),
            "reason": error.reason,
        }
        return "", {**told, "is_of_calls": error.is_of_calls}
    except MemoryError:
        raise
    except Exception as error:  # whatever a stranger's values lead to
        message = f"cannot be compiled: {type(error).__name__}"
        return "", {"at": "", "message": message, "reason": "INVALID_GRAMMAR"}


if __name__ == "__main__":
    main(*sys.argv[1:])
