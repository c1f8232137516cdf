"""A hook of MkDocs: links that leave docs/ are for readers of the repository; on the site only their text is shown."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)\s]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page before it is rendered."""
    return _OUTSIDE.sub(r"\1", markdown)
