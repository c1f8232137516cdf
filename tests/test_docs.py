"""Code in the documents is the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXCERPT = re.compile(r"```python\n# (services/\S+\.py)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["add-a-model.md"])
def test_excerpts_stand_in_the_files_they_name(name: str) -> None:
    excerpts = EXCERPT.findall((ROOT / "docs" / name).read_text())
    assert excerpts
    for path, code in excerpts:
        assert code in (ROOT / path).read_text(), path
