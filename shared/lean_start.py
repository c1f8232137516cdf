"""Imported before all else by the programs that are services: their libraries are loaded sooner.

A start is processor time, most of it imports: of six processes that start at once on a few cores.
"""

import gc
import sys

# What imports make lives on; collecting garbage after every 700 objects takes a tenth of their time. Ended by
# `service_process.settle`.
gc.disable()
# structlog loads it for tracebacks on terminals where it finds it. Services write to pipes, and their images have none.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
