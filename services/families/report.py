"""Whose code serves each part of a checkpoint, read of its files alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.families import registry
from services.families.family import Family, is_generic
from shared.checkpoint.folder import Checkpoint
from shared.errors import ServingError
from shared.model_backends import ModelBackend

NATIVE, TRANSFORMERS, REFUSED = "native", "transformers", "refused"


@dataclass(frozen=True)
class PartReport:
    """`part`: prompt, encoder or decoder. `code`: NATIVE, TRANSFORMERS or REFUSED. `detail`: "package.module:Class", or
    why it is refused."""

    part: str
    code: str
    detail: str


def code_of(name: str) -> str:
    """Whose code a part is that a record names "package.module:Class"; a family without one for prompts has the
    tokenizer's alone."""
    return TRANSFORMERS if is_generic(name) else NATIVE


def parts_of(checkpoint: Checkpoint, backend: ModelBackend = ModelBackend.AUTO) -> list[PartReport]:
    """Of each part that a checkpoint has, with a decoder of `backend`. What cannot be served is REFUSED with the
    reason."""
    own = _report("prompt", lambda: registry.find(checkpoint), lambda family: family.prompt)
    parts = [own]
    if own.code != REFUSED and registry.find(checkpoint).takes_media:
        encoder = registry.find(checkpoint).encoder
        parts.append(PartReport("encoder", code_of(encoder), encoder))
    if own.code != REFUSED:
        find = partial(_find_decoder, checkpoint, backend)
        parts.append(_report("decoder", find, lambda family: family.decoder))
    return parts


def _report(part: str, find: Callable[[], Family], name: Callable[[Family], str]) -> PartReport:
    try:
        found = name(find())
    except ServingError as error:
        return PartReport(part, REFUSED, error.message)
    return PartReport(part, code_of(found), found or "text alone")


def _find_decoder(checkpoint: Checkpoint, backend: ModelBackend) -> Family:
    registry.text_sizes(checkpoint, backend)
    return registry.find_decoder(checkpoint, backend)
