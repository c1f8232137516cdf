"""How far several prompts have been answered, as a bar on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress(total: int, *, wanted: bool) -> Iterator[Callable[[], None]]:
    """Gives what to call when one of `total` prompts is answered, from any thread."""
    if not wanted or total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
