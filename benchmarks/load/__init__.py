"""`tessera bench`: load on an OpenAI-compatible server, Tessera or another, and what a client saw of it."""

from benchmarks.load.command import main

__all__ = ["main"]
