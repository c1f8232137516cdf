"""Whether the Python modules of protos/ are those of the files that lie there."""

from pathlib import Path

PROTOS = Path(__file__).parents[2] / "protos"


def changed_protos(folder: Path = PROTOS) -> list[str]:
    """Files that have changed since they were compiled, or never were."""
    return sorted(
        str(proto.relative_to(folder))
        for proto in folder.rglob("*.proto")
        if not (module := proto.with_name(f"{proto.stem}_pb2.py")).exists()
        or module.stat().st_mtime < proto.stat().st_mtime
    )
