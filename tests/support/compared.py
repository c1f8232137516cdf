"""Models of which a test takes for granted that they are equal to their class."""

from pathlib import Path

from services.families.comparison import compares_pictures
from services.families.verdicts import Verdict, Verdicts
from shared.checkpoint.folder import Checkpoint
from shared.model_backends import ModelBackend


def take_as_compared(folder: Path, backend: ModelBackend = ModelBackend.AUTO) -> Path:
    """The folder of a checkpoint, with what an earlier comparison of the same files would have left: a decoder that
    starts now does without the process of ten seconds. Call it when the files are as they will be.

    `tests/comparison` compares every family, and `tests/decoder/models/test_generic_media.py` one beside a decoder.
    """
    checkpoint = Checkpoint(folder)
    if compares_pictures(checkpoint, backend):
        Verdicts(checkpoint, backend, str(False)).write(Verdict())
    return folder
