"""The process in which chat templates are compiled and rendered, one at a time, within bounds of memory and time.

A template is a program. Within one operation ("x" * 10**10, 9**9**9) nothing of Python can stop it, so the kernel does:
the process may take so much memory and, for each job, so much processor time (which `processes` sets), and
reaches no file, network or other process.

Messages go over standard input, which is a socket, both ways (`template_messages`).

`python -m shared.text.templates.worker <most bytes of memory>`
"""

import json
import marshal
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2

from shared.confinement.confinement import confine
from shared.text.templates.environment import environment, load_late
from shared.text.templates.loops import loops_over_content
from shared.text.templates.messages import LENGTHS, NO_MEMORY

MOST_CHARACTERS = 32 << 20  # no more comes in with a request
_KEPT_TEMPLATES = 8
# A process that holds this much more than before its first template is not used again: what templates have left
# behind would count for the next.
_GROWN_BYTES = 64 << 20


class _Refusal(Exception):
    """The template refused the conversation (`raise_exception`), or wrote too much."""


def main(memory_bytes: str) -> None:
    """Says what is missing of the confinement, then answers jobs until its input ends."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb")
    load_late()
    _done({"template": "{{ 1 // messages }}", "variables": {"messages": 0}})  # loads the rest
    sizes = os.open("/proc/self/statm", os.O_RDONLY)
    held = confine(int(memory_bytes), 0)
    start = _held(sizes)
    _send(sink, asdict(held))
    try:
        while (job := _receive(source)) is not None:
            text, answer = _done(job)
            grown = _held(sizes) - start > _GROWN_BYTES
            _send(sink, {**answer, "last": grown}, text)
            if grown:
                return
    except MemoryError:
        os._exit(NO_MEMORY)  # nothing is taken for granted, not even memory for an answer


def _held(sizes: int) -> int:
    """Bytes of the address space that this process has taken."""
    os.lseek(sizes, 0, os.SEEK_SET)
    return int(os.read(sizes, 64).split()[0]) * resource.getpagesize()


def _done(job: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A text and nothing else, or why there is none."""
    try:
        template, loops = _compiled(job["template"])
        if job["variables"] is None:
            return "", {"loops": loops}
        return "".join(_bounded(template.generate(job["variables"]))), {}
    except MemoryError:
        raise
    except _Refusal as error:
        return "", {"refused": str(error)}
    except RecursionError:
        return "", {
            "refused": "the chat template fails on these messages: they are nested too deep"
        }
    except jinja2.TemplateError as error:
        return "", {"refused": f"the chat template cannot be rendered: {_short(error)}"}
    except Exception as error:  # a template raises whatever its operations do
        return "", {"refused": f"the chat template fails on these messages: {_short(error)}"}


@lru_cache(_KEPT_TEMPLATES)
def _compiled(source: str) -> tuple[jinja2.Template, bool]:
    """The template, and whether it has a loop over the parts of a message. Raises _Refusal."""
    try:
        return _SANDBOX.from_string(source), loops_over_content(_SANDBOX.parse(source))
    except MemoryError:
        raise
    except RecursionError:
        raise _Refusal("the chat template does not compile: it is nested too deep") from None
    except Exception as error:  # of Python's compiler, too
        raise _Refusal(f"the chat template does not compile: {_short(error)}") from error


def _refuse(message: str) -> None:
    raise _Refusal(message)


_SANDBOX = environment(_refuse)


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MOST_CHARACTERS:
            raise _Refusal(f"the chat template wrote over {MOST_CHARACTERS} characters")
        yield piece


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 500 else text[:497] + "..."


def _receive(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        return None
    length, _ = LENGTHS.unpack(head)
    job: dict[str, Any] = marshal.loads(source.read(length))
    return job


def _send(sink: BinaryIO, message: dict[str, Any], text: str = "") -> None:
    head = json.dumps({**message, "processor_s": time.process_time()}).encode()
    body = text.encode("utf-8", "surrogatepass")
    sink.write(LENGTHS.pack(len(head), len(body)) + head + body)
    sink.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
