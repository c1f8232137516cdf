"""Where a checkpoint keeps its chat template. Standard library only."""

from pathlib import Path
from typing import Any

from shared.bounded_file import Bounds, OutOfBounds, read_text, read_value
from shared.errors import InvalidRequest

TEMPLATE = Bounds(4 << 20, 0)  # released ones have up to 100 KB


def read_template(folder: Path) -> str | None:
    """The checkpoint's own template, from the first of the places where Hugging Face has put it, or None."""
    raw = folder / "chat_template.jinja"
    if raw.is_file():
        return read_template_file(raw)
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        found = _templates(folder / name).get("default")
        if found is not None:
            return found
    return None


def read_tool_template(folder: Path) -> str | None:
    """The template that a checkpoint's tokenizer names `tool_use`: for conversations with tools, in place of the other.
    None where there is none.
    """
    raw = folder / "additional_chat_templates" / "tool_use.jinja"
    if raw.is_file():
        return read_template_file(raw)
    if (folder / "chat_template.jinja").is_file():  # then that of the other file does not count
        return None
    return _templates(folder / "tokenizer_config.json").get("tool_use")


def _templates(path: Path) -> dict[str, str]:
    """The templates in a JSON file, by name; one without a name is the default."""
    found = _read_json(path).get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if not isinstance(found, dict):
        found = {"default": found}
    return {name: source for name, source in found.items() if isinstance(source, str)}


def read_template_file(path: Path) -> str:
    """The text of a file that holds a chat template alone. Raises InvalidRequest if it cannot be read."""
    try:
        return read_text(path, TEMPLATE)
    except OutOfBounds as error:
        raise InvalidRequest("BAD_CHECKPOINT", str(error), field="model") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"{path} cannot be read: {error}", field="model"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_value(path)
    except OutOfBounds as error:
        raise InvalidRequest("BAD_CHECKPOINT", str(error), field="model") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest("BAD_CHECKPOINT", f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
