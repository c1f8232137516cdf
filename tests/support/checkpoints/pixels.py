"""What preprocess makes of pictures for a generic encoder."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import PIL.Image

from services.preprocess.worker.processor_maker import ProcessorMaker
from services.vision_encoder.towers.encoder import PixelArray
from shared.artifacts import bundle


def encoder_tensors(
    folder: Path, pictures: Iterable[PIL.Image.Image]
) -> list[Mapping[str, PixelArray]]:
    """Of each picture the tensors that the encoder of the checkpoint in `folder` is given."""
    maker = ProcessorMaker(folder)
    return [bundle.unpack(np.asarray(maker.make(picture)[0])) for picture in pictures]
