"""How many images and videos a prompt may have: the operator's limits and the model's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality
from tessera.preprocess.v1.preprocess_pb2 import Media, Video

_NAMES = {Modality.MODALITY_IMAGE: "image", Modality.MODALITY_VIDEO: "video"}


@dataclass(frozen=True)
class ItemLimits:
    """`setting` is --limit-mm-per-prompt's (see `limit_setting.py`); `model` that of the family's prompt rule, where
    None is any number.
    """

    setting: Mapping[str, int]
    model: Mapping[Modality.ValueType, int | None]
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
            (self.setting[name], "--limit-mm-per-prompt"),
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
