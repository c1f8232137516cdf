"""Finds the family of a checkpoint: a folder beside this file, a record that an installed package brings, or the code
of transformers.

A package brings one by an entry point of the group "tessera.families" whose value is a `Family`. The folders here go
before packages, and both before transformers (`generic.py`, `generic_media.py`); two packages that serve the same model
are refused. `--family NAME` (`Checkpoint.family`) is a folder's name or an entry point's, and goes before all.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import services.families
from services.families import generic, generic_media
from services.families.family import Family, is_generic, load_part
from services.families.vectors import MODULES, generating_name
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.model_config.decoder import DecoderConfig, TextSizes

GROUP = "tessera.families"
_DEFAULT_TEXT_TYPE = "llama"  # transformers' own, for composite models whose text_config names none


def find(checkpoint: Checkpoint) -> Family:
    """The family of the checkpoint's architecture, which has its prompt rule and its encoder.

    Raises InvalidRequest if it has none and is no model of text alone, if it has more than one, or if the code of
    transformers is known not to run here; if the one that it is to be served as does not exist.
    """
    if checkpoint.family:
        return _named(checkpoint.family)
    for family in in_tree():
        if family.is_known_by_keys and family.recognises(checkpoint):
            return family
    architecture = checkpoint.architecture
    found = _native(checkpoint, architecture, lambda family: architecture in family.architectures)
    found = found or generic_media.family_of(checkpoint)
    if found is None:
        alike = generating_name(architecture)
        found = _native(checkpoint, architecture, lambda family: alike in family.architectures)
    if found is not None:
        return found
    if checkpoint.text_config is not checkpoint.config or checkpoint.vision_config is not None:
        raise _unknown(checkpoint, architecture)
    return generic.GENERIC


def find_decoder(checkpoint: Checkpoint, backend: ModelBackend = ModelBackend.AUTO) -> Family:
    """The family of the checkpoint's text model, which has its decoder: that of the code of transformers where
    `backend` says so, or where there is no other. Raises as `find` does."""
    family = find(checkpoint)
    # Such a class may be anything, whatever its text model is called.
    if is_generic(family.decoder):
        if backend is ModelBackend.NATIVE:
            raise _unknown(checkpoint, checkpoint.kind)
        return family
    if backend is ModelBackend.TRANSFORMERS:
        return generic.GENERIC
    if checkpoint.family and family.decoder:
        return family
    own = family.text_types
    kind = str(checkpoint.text_config.get("model_type") or (*own, _DEFAULT_TEXT_TYPE)[0])
    what = f"{checkpoint.kind} with text model {kind!r}"
    found = _native(checkpoint, what, lambda family: kind in family.text_types)
    if found is None and backend is ModelBackend.NATIVE:
        raise _unknown(checkpoint, what)
    if found is None and family.takes_media and not generic.is_listed(checkpoint.kind):
        raise unsupported(
            checkpoint,
            f"there is no decoder here for its text model {kind!r}, and transformers has no class for the whole",
        )
    if backend is ModelBackend.AUTO and generic.has_other_activation(checkpoint, kind):
        return generic.GENERIC
    return found or generic.GENERIC


def is_for_vectors(checkpoint: Checkpoint) -> bool:
    """Whether it was saved to give vectors or scores: it may have no output matrix."""
    alike = generating_name(checkpoint.kind)
    is_alike = any(alike in family.architectures for family in in_tree())
    return (alike != checkpoint.kind and is_alike) or (checkpoint.folder / MODULES).is_file()


def text_sizes(checkpoint: Checkpoint, backend: ModelBackend = ModelBackend.AUTO) -> TextSizes:
    """Of the language part. Raises InvalidRequest for what its decoder does not have."""
    sizes: TextSizes = load_part(find_decoder(checkpoint, backend).config)(checkpoint)
    return sizes


def decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The shape of the language part, for a decoder of ours. Raises InvalidRequest for what it does not have."""
    config = text_sizes(checkpoint, ModelBackend.NATIVE)
    assert isinstance(config, DecoderConfig)
    return config


def in_tree() -> tuple[Family, ...]:
    """The families of this folder, in the order of their folders' names."""
    return tuple(_by_folder().values())


@cache
def _by_folder() -> dict[str, Family]:
    package = services.families
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.ispkg)
    return {name: importlib.import_module(f"{package.__name__}.{name}").FAMILY for name in names}


def _named(name: str) -> Family:
    """A package whose family has the name of a folder here is the one that is meant: it would not be found else."""
    folders = _by_folder()
    found = [point for point in entry_points(group=GROUP) if point.name == name]
    if len(found) > 1:
        raise InvalidRequest(
            "AMBIGUOUS_FAMILY",
            f"--family {name} is {' and '.join(sorted(map(_describe, found)))}: uninstall one",
            field="family",
        )
    if found:
        return _load(found[0])
    if name not in folders:
        known = ", ".join([*folders, *(point.name for point in entry_points(group=GROUP))])
        raise InvalidRequest(
            "UNKNOWN_FAMILY",
            f"--family {name}: there is no such family; there are {known}",
            field="family",
        )
    return folders[name]


def _native(checkpoint: Checkpoint, what: str, serves: Callable[[Family], bool]) -> Family | None:
    own = [family for family in in_tree() if serves(family) and family.recognises(checkpoint)]
    if own:
        return max(own, key=lambda family: len(family.config_keys))
    plugins = _plugins()
    found = {
        name: family
        for name, family in plugins.items()
        if serves(family) and family.recognises(checkpoint)
    }
    if len(found) > 1:
        raise InvalidRequest(
            "AMBIGUOUS_FAMILY",
            f"{checkpoint.folder}: {what} is served by {' and by '.join(sorted(found))}: uninstall one",
            field="model",
        )
    return next(iter(found.values()), None)


def _plugins() -> dict[str, Family]:
    """The families of installed packages. Raises InvalidRequest for one that cannot be imported."""
    return {_describe(point): _load(point) for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Family:
    try:
        family: Family = point.load()
    except Exception as error:  # whatever a foreign package raises
        raise InvalidRequest(
            "BAD_FAMILY",
            f"the family {_describe(point)} cannot be imported: {error}",
            field="model",
        ) from error
    return family


def _describe(point: EntryPoint) -> str:
    return f"{point.name} of the package {point.dist.name if point.dist else point.value}"


def _unknown(checkpoint: Checkpoint, what: str) -> InvalidRequest:
    families = (*in_tree(), *_plugins().values())
    architectures = ", ".join(name for family in families for name in family.architectures)
    texts = ", ".join(name for family in families for name in family.text_types)
    return InvalidRequest(
        "UNKNOWN_ARCHITECTURE",
        f"{checkpoint.folder}: {what} cannot be served; these can: {architectures}, with a text model of {texts}."
        " One of these under another name is served with --family NAME",
        field="model",
    )
