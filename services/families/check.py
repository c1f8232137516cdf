"""Whether a model can be served here: said by its files within a second, before anything is started or loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Flag, auto
from pathlib import Path

from services.families import generic, registry
from services.families.coded_tensors import require_coded_tensors
from services.families.family import GENERIC_ENCODER, is_generic
from services.families.narrow_attention import require_narrow
from shared import kv_cache_dtype
from shared.bounded_file import OutOfBounds, require_bounded
from shared.checkpoint.files import (
    read_json,
    require_processor,
    require_tokenizer,
    require_weights,
)
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.hardware.ascend import is_310p
from shared.hardware.devices import require_computable, resolve_device
from shared.model_backends import ModelBackend
from shared.model_config.decoder import refuse_quantization
from shared.text.vocabulary_bounds import tokens_outside
from shared.weights import scheme
from tessera.common.v1.media_pb2 import Modality


class Parts(Flag):
    """What a service reads of a checkpoint beside config.json."""

    TOKENIZER = auto()
    PROCESSOR = auto()
    WEIGHTS = auto()
    ALL = TOKENIZER | PROCESSOR | WEIGHTS


def require_servable(
    folder: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    parts: Parts = Parts.ALL,
    backend: ModelBackend = ModelBackend.AUTO,
    trust_remote_code: bool | None = None,
    family: str = "",
    quantization: str = scheme.AUTO,
    kv_cache: str = kv_cache_dtype.AUTO,
) -> Checkpoint:
    """The checkpoint, if it can be served on `device` in `dtype` by the code of `backend`, as `family` where that is
    given, its decoder quantized when it is loaded as `quantization` says, with a cache as `kv_cache` says.
    `trust_remote_code` is None for services that do not run that code.

    Raises InvalidRequest with the first reason why not: a folder that is none, an architecture or an option of
    config.json that is not known, a missing or unfinished file among `parts`, a device that is not there.
    """
    if not folder.is_dir():
        raise InvalidRequest("NO_MODEL", f"no checkpoint folder at {folder}", field="model")
    if not (folder / "config.json").exists():
        raise InvalidRequest(
            "NO_MODEL",
            f"{folder} is no Hugging Face checkpoint: it has no config.json",
            field="model",
        )
    require_readable(folder)
    read_json(folder / "config.json")
    checkpoint = Checkpoint(folder, family)
    with understood(folder):
        record = registry.find(checkpoint)
        decoder = registry.find_decoder(checkpoint, backend)
        generic_code = is_generic(decoder.decoder)
        by = ModelBackend.TRANSFORMERS if generic_code else ModelBackend.NATIVE
        if record.takes_media and record.encoder == GENERIC_ENCODER:
            by = ModelBackend.TRANSFORMERS  # its class would be built as the configuration says
        refuse_quantization(checkpoint, by)
        if generic_code:
            scheme.refuse_for_transformers(quantization, checkpoint.kind)
        sizes = registry.text_sizes(checkpoint, backend)
        if decoder is generic.GENERIC and trust_remote_code is not None:
            generic.require_trusted(checkpoint, trust_remote_code)
        if record.takes_media:
            record.largest(checkpoint, Modality.MODALITY_IMAGE)
    if Parts.TOKENIZER in parts:
        require_tokenizer(folder)
        _require_vocabulary(checkpoint, sizes.vocab_size)
    if Parts.PROCESSOR in parts and record.takes_media and not record.processor:
        require_processor(folder)
    if Parts.WEIGHTS in parts:
        require_weights(folder)
        with understood(folder):
            require_coded_tensors(checkpoint, backend)
        require_computable(device, dtype)
        _require_device(checkpoint, resolve_device(device), quantization, kv_cache)
    return checkpoint


def _require_device(checkpoint: Checkpoint, device: str, quantization: str, kv_cache: str) -> None:
    """Raises InvalidRequest for what only some devices compute."""
    if device == "npu":
        scheme.require_on_npu(quantization, is_310p())
        kv_cache_dtype.require_on_npu(kv_cache, is_310p())
    elif kv_cache != kv_cache_dtype.AUTO and device != "cpu":
        raise kv_cache_dtype.refused(
            kv_cache, f"it is for the CPU and NPUs, and not for {device}; leave the flag away"
        )
    if device == "npu" and is_310p():
        with understood(checkpoint.folder):
            require_narrow(checkpoint)


def _require_vocabulary(checkpoint: Checkpoint, size: int) -> None:
    """Raises InvalidRequest for a tokenizer that cannot be read, and for a token beyond the model's vocabulary of
    `size`; where that is 0, nothing says it."""
    try:
        outside = tokens_outside(checkpoint.folder, size) if size else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{checkpoint.folder}: the tokenizer cannot be used: {error}",
            field="model",
        ) from error
    if outside:
        first = outside[0]
        more = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{checkpoint.folder / first.file}: the token {first.text!r} has the id {first.index}{more}; config.json"
            f" has a vocabulary of {size}, ids 0 to {size - 1}: use the tokenizer that the model was saved with",
            field="model",
        )


def require_readable(folder: Path) -> None:
    """Raises InvalidRequest for a folder with a file that is too large or too deep to be read, or that is a FIFO or a
    device: before a library reads it."""
    try:
        require_bounded(folder)
    except OutOfBounds as error:
        raise InvalidRequest("BAD_CHECKPOINT", str(error), field="model") from None
    except OSError as error:
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"{folder} cannot be read: {error}", field="model"
        ) from error


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    """A value of another type than the key has is a fault of the file, like all others."""
    try:
        yield
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{folder / 'config.json'} has a value that makes no sense: {error}",
            field="model",
        ) from error
