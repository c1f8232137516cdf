"""."""

from tests.ascend.breaks.fault import Break

BREAKS: list[Break] = []
