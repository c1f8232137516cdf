"""Small real processes to supervise."""

import functools
from pathlib import Path

import pytest

from tests.support.processes.program import ProgramMaker, make_program
from tests.support.processes.supervision import Record


@pytest.fixture
def program(tmp_path: Path) -> ProgramMaker:
    """`make_program` with its files in the test's folder."""
    return functools.partial(make_program, tmp_path)


@pytest.fixture
def record() -> Record:
    """What the supervisor says of them."""
    return Record()
