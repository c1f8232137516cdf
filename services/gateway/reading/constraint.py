"""The form that a request holds its answer to, before it is compiled."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

# Bytes of what a request sends, and of the grammar made of it. A schema of 60 fields has about 6,000.
LONGEST = 256 << 10


@dataclass(frozen=True, slots=True)
class Constraint:
    """What stands in a body, and where: errors name `field`."""

    field: str
    kind: Kind
    json: bytes  # the value as JSON, or JSON within a string of JSON
    # Of "json" and the schemas in a "structural_tag":
    closed: bool = True  # objects have no properties but those that are listed
    lenient: bool = False  # keywords that cannot be held to are left aside
    whitespace: str | None = (
        None  # a regular expression; empty is none between values, None the default
    )
    # Of "json": the answer may be calls of tools instead, in this form.
    calls: "Constraint | None" = None
