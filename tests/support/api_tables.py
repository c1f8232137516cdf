"""`python -m tests.support.api_tables`: writes the tables of docs/api.md that are made from the types of fields.

Such a table stands between `<!-- fields of package.module:Struct: name name ... -->` and `<!-- end -->`.
"""

import importlib
import re
from pathlib import Path

from services.gateway.api.tessera.description.schemas import Schemas
from services.gateway.decoding.about import DEFAULT_KEY

FILE = Path(__file__).parents[2] / "docs/api.md"
_TABLE = re.compile(r"(<!-- fields of (\S+):(\w+): ([\w\s]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_HEAD = "| field | value | default |\n|---|---|---|\n"


def written(text: str) -> str:
    """A document with all its tables as they should be."""
    return _TABLE.sub(
        lambda found: found[1] + _table(found[2], found[3], found[4]) + found[6], text
    )


def _table(module: str, struct: str, names: str) -> str:
    kind = getattr(importlib.import_module(module), struct)
    fields = Schemas([kind]).fields(kind)
    rows = (
        f"| `{name}` | {fields[name]['description']} | {fields[name].get(DEFAULT_KEY, '')} |\n"
        for name in names.split()
    )
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text(encoding="utf-8")), encoding="utf-8")
