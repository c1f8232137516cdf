"""What is known of a media item once its pixel values are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.families.family import ItemSize


@dataclass(frozen=True)
class MadeItem(ItemSize):
    """A media item whose pixel values are made: its size before that, and what its processor says of it.

    `ids`, `fields`: of the generic rule's items; see `services.preprocess.worker.processor_maker`.
    """

    seconds_per_frame: float = 0.0  # of a video; 0 where it is not known
    # What its processor was called with beside its settings.
    options: Mapping[str, Any] = field(default_factory=dict)
    ids: Sequence[int] = ()
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
