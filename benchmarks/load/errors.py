"""The one error of `tessera bench`."""


class BenchError(Exception):
    """A message for the user; nothing was measured."""
