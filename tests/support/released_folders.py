"""What tests of released layouts share: changes of a folder's files, and conversations as clients send them."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tests.support.pictures import data_url

IMAGE = "<image>"


def edited(path: Path, without: Collection[str] = (), **changes: Any) -> Path:
    """A JSON file with other values for these keys and without others; it need not be there before."""
    content = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: value for key, value in (content | changes).items() if key not in without}
    path.write_text(json.dumps(kept))
    return path


def message(talk: Sequence[tuple[str, str]], picture: bytes = b"") -> list[dict[str, Any]]:
    """A conversation of (role, text); where a text begins with IMAGE and a line break, the picture is a part of its
    own."""
    shown = {"type": "image_url", "image_url": {"url": data_url(picture)}}

    def content(text: str) -> Any:
        rest = text.removeprefix(f"{IMAGE}\n")
        return rest if rest == text else [shown, {"type": "text", "text": rest}]

    return [{"role": role, "content": content(text)} for role, text in talk]
