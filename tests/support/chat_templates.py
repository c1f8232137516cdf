"""Chat templates as preprocess renders them, for tests that start no service."""

import atexit
from collections.abc import Mapping
from functools import cache
from typing import Any

from services.preprocess.content_format import ContentFormat
from services.preprocess.prompt.chat_template import ChatTemplate
from shared.text.templates.processes import TemplateProcesses


@cache
def _processes() -> TemplateProcesses:
    """One for all tests of this process."""
    made = TemplateProcesses()
    atexit.register(made.close)
    return made


def chat_template(
    source: str,
    variables: Mapping[str, Any] | None = None,
    content_format: ContentFormat = ContentFormat.AUTO,
) -> ChatTemplate:
    """Raises TemplateRefusal as the class does."""
    return ChatTemplate(source, variables or {}, _processes(), content_format)
