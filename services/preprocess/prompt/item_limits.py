"""How many images and videos a prompt may have: the operator's limits and the model's."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality
from tessera.preprocess.v1.preprocess_pb2 import Media, Video

DEFAULT_LIMIT = 16
_MODALITIES = {"image": Modality.MODALITY_IMAGE, "video": Modality.MODALITY_VIDEO}
_NAMES = {modality: name for name, modality in _MODALITIES.items()}

Limits = Mapping[Modality.ValueType, int | None]  # None is any number


@dataclass(frozen=True)
class ItemLimits:
    """`setting` is --limit-mm-per-prompt's, of every modality; `model` that of the family's prompt rule."""

    setting: Limits
    model: Limits
    model_name: str

    def check(self, media: Sequence[Media | Video]) -> None:
        """Raises InvalidRequest naming the first item over a limit: TOO_MANY_IMAGES, TOO_MANY_VIDEOS."""
        counts: Counter[Modality.ValueType] = Counter()
        for item in media:
            is_video = isinstance(item, Video)
            modality = Modality.MODALITY_VIDEO if is_video else Modality.MODALITY_IMAGE
            counts[modality] += 1
            self._check(modality, counts[modality], item.field)

    def _check(self, modality: Modality.ValueType, count: int, field: str) -> None:
        name = _NAMES[modality]
        for limit, why in (
            (self.setting.get(modality), "--limit-mm-per-prompt"),
            (self.model.get(modality), f"all that {self.model_name} takes"),
        ):
            if limit is not None and count > limit:
                most = (
                    f"at most {limit} {name}{'' if limit == 1 else 's'}" if limit else f"no {name}s"
                )
                raise InvalidRequest(
                    f"TOO_MANY_{name.upper()}S",
                    f"{field or name}: a prompt may have {most} ({why})",
                    field=field,
                )


def parse_limits(text: str) -> dict[Modality.ValueType, int]:
    """The limits of `image=16,video=2` or `{"image": 16, "video": 2}`; `16` is for each of both.

    What is not named has DEFAULT_LIMIT. Raises ValueError.
    """
    limits = dict.fromkeys(_NAMES, DEFAULT_LIMIT)
    for name, value in _pairs(text.strip()):
        if name not in _MODALITIES:
            raise ValueError(f"{name!r} has no limit: there are {' and '.join(_MODALITIES)}")
        limits[_MODALITIES[name]] = _count(name, value)
    return limits


def _pairs(text: str) -> Sequence[tuple[str, object]]:
    if text.startswith("{"):
        return list(json.loads(text).items())
    if "=" not in text:
        return [(name, text) for name in _MODALITIES]
    pairs = [pair.partition("=") for pair in text.split(",")]
    return [(name.strip(), value) for name, _, value in pairs]


def _count(name: str, value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: {value!r} is no number of items")
    return int(text)
