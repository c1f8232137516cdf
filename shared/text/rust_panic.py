"""Libraries in Rust panic where they have no error for what they met: the tokenizers library, for instance, when the
regular expression of a tokenizer backtracks too often in a text."""

from collections.abc import Iterator
from contextlib import contextmanager

_CLASS = "PanicException"  # of pyo3, which gives no name to import


class RustPanic(Exception):
    """The library gave up; what was asked of it is not done, and it may be asked again."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises RustPanic for a panic. Its own class is no `Exception`, so whoever handles those would miss it."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != _CLASS:
            raise
        raise RustPanic(str(error)) from error
