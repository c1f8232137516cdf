"""`python -m tests.support.api_tables`: writes the tables of docs/api.md that are made from the types of fields.

Such a table stands between a comment and `<!-- end -->`. The comment is one of

    <!-- fields of package.module:Struct -->                      all fields that are not refused
    <!-- fields of package.module:Struct: name name -->           these
    <!-- fields of package.module:Struct; see name#heading -->    all, of which some lead to a heading

and may say `under options.` behind the Struct, where that is the value of another's field. Fields that have name and
meaning of one of `GenerationOptions` stand in one row, the last; neighbours of which the same is said share one.
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.api.tessera.description.schemas import Schemas
from services.gateway.decoding.about import DEFAULT_KEY
from services.gateway.reading.options import GenerationOptions

FILE = Path(__file__).parents[2] / "docs/api.md"
_TABLE = re.compile(
    r"(?P<begin><!-- fields of (?P<module>[\w.]+):(?P<struct>\w+)(?: under (?P<under>[\w.]+))?"
    r"(?::\s(?P<names>[\w\s]+?))?(?:; see\s(?P<links>[\w\s#-]+?))?\s-->\n)(?P<table>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_HEAD = "| field | value | default |\n|---|---|---|\n"
_ALIKE = "as [above](#how-to-choose-tokens) and in [what to answer](#what-to-answer)"


def written(text: str) -> str:
    """A document with all its tables as they should be."""
    return _TABLE.sub(lambda found: found["begin"] + _table(found) + found["end"], text)


def _table(found: re.Match[str]) -> str:
    kind = getattr(importlib.import_module(found["module"]), found["struct"])
    fields = Schemas([kind]).fields(kind)
    links = dict(link.split("#") for link in (found["links"] or "").split())
    names = (found["names"] or " ".join(fields)).split()
    own = {name for name in names if kind is GenerationOptions or name in _described(kind)}
    rows = [_row(name, fields[name], links) for name in names if name in own]
    shown = [
        ([name for name, _ in some], cells) for cells, some in groupby(rows, key=lambda row: row[1])
    ]
    if alike := [name for name in names if name not in own]:
        shown.append((alike, (_ALIKE, "as there")))
    return _HEAD + "".join(_written_row(some, cells, found["under"] or "") for some, cells in shown)


def _row(
    name: str, field: Mapping[str, Any], links: Mapping[str, str]
) -> tuple[str, tuple[str, str]]:
    more = f" ([more](#{links[name]}))" if name in links else ""
    return name, (field["description"] + more, field.get(DEFAULT_KEY, ""))


def _written_row(names: list[str], cells: tuple[str, str], under: str) -> str:
    listed = ", ".join(f"`{under}{name}`" for name in names)
    return f"| {listed} | {cells[0]} | {cells[1]} |\n"


def _described(kind: type[msgspec.Struct]) -> Iterator[str]:
    """The names of fields of which the Struct itself says something."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        if isinstance(field.type, msgspec.inspect.Metadata):
            said = field.type.extra_json_schema or {}
            if "description" in said:
                yield field.encode_name


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text(encoding="utf-8")), encoding="utf-8")
