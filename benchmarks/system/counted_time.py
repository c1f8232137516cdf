"""Counts the processor time that a module's functions take. `telemetry` puts this file into a copy of the source.

Each process has a page of numbers in FOLDER, by its id: of each kind the seconds and the calls, then what a call counts
where the function does nothing, and what it costs. A call within another counted one belongs to that one, and of a
coroutine each step counts by itself.
"""

import functools
import inspect
import mmap
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

FOLDER = "."  # the copy has another
KINDS = ("timelines", "metrics", "traces", "log lines", "nothing")
_NUMBERS = 2 * len(KINDS) + 2
_TRIES = 3000
_now = time.thread_time


class _Thread(threading.local):
    is_counting = False


class _Pages:
    """The page of this process, once it has counted anything."""

    def __init__(self) -> None:
        self._page: memoryview[float] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._page = None

    def add(self, number: int, seconds: float) -> None:
        page = self._page if self._page is not None else self._open()
        page[number] += seconds
        page[number + 1] += 1

    def _open(self) -> "memoryview[float]":
        path = Path(FOLDER) / str(os.getpid())
        path.write_bytes(bytes(8 * _NUMBERS))
        with path.open("r+b") as file:
            page = self._page = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        began = _now()
        for _ in range(_TRIES):
            _nothing()
        counted = _now() - began
        began = _now()
        for _ in range(_TRIES):
            _plain()
        page[-1] = (counted - (_now() - began)) / _TRIES
        page[-2] = page[2 * len(KINDS) - 2] / _TRIES
        return page


_here, _pages = _Thread(), _Pages()


def count(module: dict[str, Any], kind: str) -> None:
    """Counts all functions and methods that a module defines, from now on. Generators are left out."""
    number, name = 2 * KINDS.index(kind), module["__name__"]
    for word, value in list(module.items()):
        if getattr(value, "__module__", None) != name:
            continue
        if inspect.isfunction(value):
            module[word] = _counted(value, number)
        elif inspect.isclass(value):
            for attribute, function in list(vars(value).items()):
                if inspect.isfunction(function) and not attribute.startswith("__"):
                    setattr(value, attribute, _counted(function, number))


def _counted(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    plain = inspect.unwrap(function)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        return function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def stepped(*arguments: Any, **named: Any) -> Any:
            return await _Steps(function(*arguments, **named), number)

        return stepped

    @functools.wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        if _here.is_counting:
            return function(*arguments, **named)
        _here.is_counting = True
        began = _now()
        try:
            return function(*arguments, **named)
        finally:
            seconds = _now() - began
            _here.is_counting = False
            _pages.add(number, seconds)

    return timed


class _Steps:
    """A coroutine whose steps are counted."""

    def __init__(self, work: Awaitable[Any], number: int) -> None:
        self._work, self._number = work.__await__(), number

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = functools.partial(next, self._work)
        while True:
            try:
                waits_for = self._take(step)
            except StopIteration as end:
                return end.value
            try:
                yield waits_for
                step = functools.partial(next, self._work)
            except BaseException as error:  # a cancellation, most often
                step = functools.partial(self._work.throw, error)

    def _take(self, step: Callable[[], Any]) -> Any:
        if _here.is_counting:
            return step()
        _here.is_counting = True
        began = _now()
        try:
            return step()
        finally:
            seconds = _now() - began
            _here.is_counting = False
            _pages.add(self._number, seconds)


def _plain() -> None:
    return None


_nothing = _counted(_plain, 2 * KINDS.index("nothing"))
