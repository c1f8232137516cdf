"""Which tests go to one worker of pytest-xdist."""

import functools
import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

_MARK = re.compile(r'mark\.xdist_group\("(\w+)"\)')


class FilesAndGroups(LoadGroupScheduling):  # type: ignore[misc]  # it carries no types
    """Whole files, and those of one `xdist_group` together: what they share is made once. In the order in which they
    were collected, for the number of its tests does not say how long a file takes.

    The group is read from the file. xdist would write it behind the ids of tests, which are fixed in pytest 9.2.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / nodeid.partition("::")[0])


@functools.cache
def group_of(file: Path) -> str:
    """The name in its `pytest.mark.xdist_group`, else its own."""
    found = _MARK.search(file.read_text())
    return found[1] if found else str(file)
