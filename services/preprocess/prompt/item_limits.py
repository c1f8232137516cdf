"""How many images and videos a prompt may have: the operator's limits and the model's."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.errors import InvalidRequest
from shared.prompts.modality import NAMES, plural
from tessera.common.v1.media_pb2 import Modality


@dataclass(frozen=True)
class ItemLimits:
    """`setting` is --limit-mm-per-prompt's (see `limit_setting.py`); `model` that of the family's prompt rule, where
    None is any number.
    """

    setting: Mapping[str, int]
    model: Mapping[Modality.ValueType, int | None]
    model_name: str

    def check(self, media: Iterable[tuple[Modality.ValueType, str]]) -> None:
        """Of items by modality and field. Raises InvalidRequest naming the first over a limit: TOO_MANY_IMAGES,
        TOO_MANY_VIDEOS."""
        counts: Counter[Modality.ValueType] = Counter()
        for modality, field in media:
            counts[modality] += 1
            self._check(modality, counts[modality], field)

    def _check(self, modality: Modality.ValueType, count: int, field: str) -> None:
        name, names = NAMES[modality], plural(modality)
        for limit, why in (
            (self.setting[name], "--limit-mm-per-prompt"),
            (self.model.get(modality), f"all that {self.model_name} takes"),
        ):
            if limit is not None and count > limit:
                most = (
                    f"at most {limit} {name if limit == 1 else names}" if limit else f"no {names}"
                )
                raise InvalidRequest(
                    f"TOO_MANY_{names.upper()}",
                    f"{field or name}: a prompt may have {most} ({why})",
                    field=field,
                )
