"""What a process for chat templates and its owner agree on (`worker`, `processes`)."""

import struct

# Before each message: how many bytes its first part has, in `marshal` for a job and JSON for an answer, and the text
# behind it.
LENGTHS = struct.Struct("<II")
# Exit status of one whose template took too much memory.
NO_MEMORY = 77
