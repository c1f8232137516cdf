"""A world that has ended leaves coroutines that were never run; no test must trip over them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.world import collect

_HERE = Path(__file__).parent
_IGNORED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever the collector frees between two worlds of a file is no error."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(_IGNORED)


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing() -> Iterator[None]:
    """The tests of other files find nothing to free."""
    yield
    collect()
