"""What reference counts alone do not free."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Inside of it nothing is freed but by its reference count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(*kinds: type) -> Counter[str]:
    """How many objects there are of each of these types."""
    return Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))
