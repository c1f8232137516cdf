"""Checkpoint folders written from others, and from files of other programs: `tessera weights`, `tessera convert`."""
