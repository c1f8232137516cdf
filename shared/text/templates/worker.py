"""The process in which chat templates are compiled and rendered, one at a time, within bounds of memory and time.

A template is a program: within one operation ("x" * 10**10, 9**9**9) only the kernel can stop it.

`python -m shared.text.templates.worker <most bytes of memory>`
"""

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import jinja2

from shared.confinement.job_loop import answer_jobs
from shared.text.templates.environment import environment, load_late
from shared.text.templates.loops import loops_over_content

MOST_CHARACTERS = 32 << 20  # no more comes in with a request
_KEPT_TEMPLATES = 8


class _Refusal(Exception):
    """The template refused the conversation (`raise_exception`), or wrote too much."""


def main(memory_bytes: str) -> None:
    """Renders templates until its input ends."""
    load_late()
    _done({"template": "{{ 1 // messages }}", "variables": {"messages": 0}})  # loads the rest
    answer_jobs(int(memory_bytes), _done)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
