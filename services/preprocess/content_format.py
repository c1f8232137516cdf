"""What chat templates are given as a message's content."""

from enum import StrEnum


class ContentFormat(StrEnum):
    """`--chat-template-content-format`."""

    AUTO = "auto"  # what the template takes
    STRING = "string"
    OPENAI = "openai"  # a list of parts, which vLLM calls so
