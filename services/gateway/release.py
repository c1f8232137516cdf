"""Which release this is."""

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The version of the installed package, or what stands for one in a checkout."""
    try:
        return version("tessera-serve")
    except PackageNotFoundError:
        return "0.1.0+checkout"
