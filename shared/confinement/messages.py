"""What a confined process and its owner agree on (`job_loop.py`, `processes.py`)."""

import struct

# Before each message: how many bytes its first part has, in `marshal` for a job and JSON for an answer, and the text
# behind it.
LENGTHS = struct.Struct("<II")
# Exit status of one whose job took too much memory.
NO_MEMORY = 77
