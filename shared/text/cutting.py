"""Texts of bounded length, for what leaves a process."""


def cut(text: str, longest: int) -> str:
    """The text, or where it is longer its beginning and how much is missing."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}... ({len(text) - longest} more characters)"
