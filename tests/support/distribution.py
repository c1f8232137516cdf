"""Which tests go to one worker of pytest-xdist."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling


class FilesAndGroups(LoadGroupScheduling):
    """Whole files, and those of one `xdist_group` together: what they share is made once. In the order in which they
    were collected, for the number of its tests does not say how long a file takes.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]
