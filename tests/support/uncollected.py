"""What reference counts alone do not free."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Inside of it nothing is freed but by its reference count, and `alive` counts what has been made inside of it: not
    what other tests of this process have left."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()  # what is set aside stays so: all that tests import, where nothing is garbage


def alive(*kinds: type) -> Counter[str]:
    """How many objects there are of each of these types, but for those that the collector has set aside (frozen)."""
    return Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))
