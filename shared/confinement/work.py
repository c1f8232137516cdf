"""What confined processes do for their owner, and how a job ends that goes beyond its bounds."""

from dataclasses import dataclass


class JobLimit(Exception):
    """A job went beyond its bounds; the message says of what, as "took more than 512 MB of memory"."""

    def __init__(self, message: str, *, is_time: bool = False) -> None:
        super().__init__(message)
        self.is_time = is_time  # too much time: it may be less another time


@dataclass(frozen=True, slots=True)
class Work:
    """What processes do: the module that runs in each (its argument is `memory_bytes`, and it calls `answer_jobs`),
    what it works on for messages, the reason of errors about the process itself, and the bounds.
    """

    module: str
    what: str  # "chat templates"
    reason: str  # "TEMPLATE_PROCESS"
    memory_bytes: int  # beside the process's own
    processor_s: int  # of each job
    answer_bytes: int  # of the values and the text that a job gives, as they are sent
    # Of real time from a job to the end of its answer, for one that waits: nothing in a job can. On a busy machine
    # processor time takes longer.
    real_s: float = 60.0
    # For a process that has closed its end, or has been killed, until the kernel has ended it.
    end_s: float = 10.0
