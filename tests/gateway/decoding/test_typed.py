"""Decoders of JSON that several threads ask for first."""

import subprocess
import sys

# Types that nobody has seen, asked for by three threads at once. In a process of its own: a fault of memory ends it.
_PROGRAM = """
import sys, threading
import msgspec
from services.gateway.decoding.typed import decoder_of

sys.setswitchinterval(1e-6)
numbers = [(f"n{i}", int | float | None, None) for i in range(30)]
body = b'{"parts": [{"inner": {"n1": 1}, "n3": 2}], "named": {"x": {"words": ["s"]}}, "n9": 1}'
for _ in range(int(sys.argv[1])):
    inner = msgspec.defstruct("Inner", [*numbers, ("words", list[str] | None, None)])
    part = msgspec.defstruct("Part", [("inner", inner | None, None), *numbers])
    fields = [("parts", list[part] | None, None), ("named", dict[str, inner] | None, None)]
    kind = msgspec.defstruct("Body", [*fields, *numbers])
    barrier, read = threading.Barrier(3), []

    def ask():
        barrier.wait()
        read.append(decoder_of(kind).decode(body).parts[0].inner.n1)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [1, 1, 1], read
"""


def test_threads_that_see_a_type_first_at_once_read_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, "300"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
