"""Fields under the names that an API has for them: errors of what all APIs share are about our own names."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from shared.errors import InvalidRequest

_ROOT = re.compile(r"[^.\[]*")


@contextlib.contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Raises InvalidRequest of the block anew, with `names` in the places of our fields' own."""
    try:
        yield
    except InvalidRequest as error:
        field = error.metadata.get("field", "")
        found = _ROOT.match(field)
        root = found[0] if found is not None else ""
        if root not in names:
            raise
        renamed = names[root] + field.removeprefix(root)
        message = error.message
        if message.startswith(field):
            message = renamed + message.removeprefix(field)
        metadata = {**error.metadata, "field": renamed}
        raise type(error)(error.reason, message, **metadata) from None
