"""The system message in conversation.py, which releases of InternVL bring with their code: read as data, never run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LARGEST = 1 << 20  # bytes; released ones have some 15,000


def system_message(folder: Path, template: str) -> str | None:
    """That of the conversation template of this name; None where there is no such file, or no such template in it."""
    path = folder / "conversation.py"
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for values in _conversations(tree):
        if values.get("name") == template and isinstance(values.get("system_message"), str):
            return str(values["system_message"])
    return None


def _conversations(tree: ast.AST) -> Iterator[dict[str, Any]]:
    """The constants that each `Conversation(...)` is made of, by the names of its arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Conversation":
            yield {
                keyword.arg: keyword.value.value
                for keyword in node.keywords
                if keyword.arg and isinstance(keyword.value, ast.Constant)
            }
