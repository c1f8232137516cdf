"""The kinds of media: the one table of those that are served, and the reading of the field that says an item's kind."""

from collections.abc import Collection, Mapping
from typing import TypeAlias

from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import MediaItem, Modality

Kind: TypeAlias = Modality.ValueType

IMAGE = Modality.MODALITY_IMAGE
VIDEO = Modality.MODALITY_VIDEO

# What chat templates and --limit-mm-per-prompt call each; a modality without a name is served nowhere.
NAMES: Mapping[Kind, str] = {IMAGE: "image", VIDEO: "video"}


def plural(modality: Kind) -> str:
    """Several items of a kind, as messages call them."""
    return f"{NAMES[modality]}s"


def read_modality(number: int, field: str, unset: Kind = IMAGE) -> Kind:
    """The modality that a message names, `unset` where it names none: messages may be older than the field.

    Raises InvalidRequest naming `field` and the number of one that is not served.
    """
    for modality in NAMES:
        if number == modality:
            return modality
    if number == Modality.MODALITY_UNSPECIFIED:
        return unset
    known = " and ".join(f"{name} ({number})" for number, name in NAMES.items())
    raise InvalidRequest(
        "UNKNOWN_MODALITY",
        f"{field}: media of modality {number} are not known here: there are {known}",
        field=field,
        modality=str(number),
    )


def modality_of(item: MediaItem, field: str = "media") -> Kind:
    """The modality of a prompt's item. Raises InvalidRequest for one that is not served."""
    return read_modality(item.modality, field)


def require_taken(modality: Kind, taken: Collection[Kind], model_name: str, field: str) -> None:
    """Raises InvalidRequest naming `field` where a model does not take items of a modality."""
    if modality not in taken:
        raise InvalidRequest(
            f"NO_{NAMES[modality].upper()}_MODEL",
            f"{field}: {model_name} takes no {plural(modality)}",
            field=field,
        )
