"""A whole system that several files share: each of its processes may be killed, for it is started again."""

from collections.abc import Iterator

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.processes.system import System


@pytest.fixture(scope="package")
def system_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Rotary positions of three axes, two of everything that scales, float32. Files that take it are of one
    `xdist_group`."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen2_vl")
    flags = ("--decoders", "2", "--vision-encoders", "2", "--preprocessors", "2")
    with System(folder, *flags, "--dtype", "float32") as running:
        yield running
