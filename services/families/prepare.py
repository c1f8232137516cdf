"""What a service does about its model before it imports anything large: finds its folder, and checks it."""

from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from services.families.check import Parts, require_servable
from shared import kv_cache_dtype
from shared.checkpoint.gguf.prepared import prepared_folder
from shared.checkpoint.hub import find_on_hub
from shared.errors import InvalidRequest, NotFound, ServingError
from shared.hardware.devices import require_computable
from shared.model_backends import ModelBackend
from shared.settings import CommonSettings, ServiceSettings, hub_name
from shared.weights import scheme

log = structlog.get_logger(__name__)

S = TypeVar("S", bound=ServiceSettings)
C = TypeVar("C", bound=CommonSettings)


def prepare_model(
    settings: S,
    parts: Parts,
    *,
    device: str = "auto",
    dtype: str = "auto",
    backend: ModelBackend = ModelBackend.AUTO,
    trust_remote_code: bool | None = None,
    quantization: str = scheme.AUTO,
    kv_cache: str = kv_cache_dtype.AUTO,
) -> S:
    """The settings with the folder of a model that can be served.

    Exits, with one line that gives the reason: status 2 where starting again would be of no use, else 1.
    """
    try:
        if name := hub_name(settings.model):
            if Parts.WEIGHTS in parts:
                require_computable(device, dtype)  # before gigabytes are fetched
            changes = {
                "served_model_name": settings.model_name,
                "model": find_servable(
                    name, settings.revision, backend, trust_remote_code, settings.family
                ),
            }
            settings = settings.model_copy(update=changes)
        settings = with_prepared(settings)
        require_servable(
            settings.model,
            device=device,
            dtype=dtype,
            parts=parts,
            backend=backend,
            trust_remote_code=trust_remote_code,
            family=settings.family,
            quantization=quantization,
            kv_cache=kv_cache,
        )
    except ServingError as error:
        log.error("cannot go on", reason=error.reason, error=error.message)
        raise SystemExit(2 if isinstance(error, InvalidRequest | NotFound) else 1) from None
    return settings


def with_prepared(settings: C) -> C:
    """The settings with the folder that is made of the model, where it is a GGUF file. Raises as `prepared_folder`
    does."""
    folder = prepared_folder(settings.model, settings.mmproj)
    if folder == settings.model:
        return settings
    changes = {"served_model_name": settings.model_name, "model": folder, "mmproj": ""}
    return settings.model_copy(update=changes)


def find_servable(
    name: str,
    revision: str = "",
    backend: ModelBackend = ModelBackend.AUTO,
    trust_remote_code: bool | None = None,
    family: str = "",
) -> Path:
    """The folder of a model of the hub. Raises as `find_on_hub` and `require_servable` do."""
    check = partial(
        require_servable,
        parts=Parts.TOKENIZER | Parts.PROCESSOR,
        backend=backend,
        trust_remote_code=trust_remote_code,
        family=family,
    )
    return find_on_hub(name, check, revision)
