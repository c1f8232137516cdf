"""The one error of `tessera bench`."""


class BenchError(Exception):
    """What the user has to be told; nothing was measured."""
