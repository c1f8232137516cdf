"""Whether a model can be served here: said by its files within a second, before anything is started or loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Flag, auto
from pathlib import Path

from shared.checkpoint.folder import Checkpoint
from shared.devices import resolve_device
from shared.errors import InvalidRequest
from shared.model_config.decoder import refuse_quantization
from shared.model_config.families import LLAVA, has_vision, read_decoder_config
from shared.model_config.files import (
    read_json,
    require_processor,
    require_tokenizer,
    require_weights,
)
from shared.model_config.llava import LlavaConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


class Parts(Flag):
    """What a service reads of a checkpoint beside config.json."""

    TOKENIZER = auto()
    PROCESSOR = auto()
    WEIGHTS = auto()
    ALL = TOKENIZER | PROCESSOR | WEIGHTS


def require_servable(
    folder: Path, *, device: str = "auto", dtype: str = "auto", parts: Parts = Parts.ALL
) -> Checkpoint:
    """The checkpoint, if it can be served on `device` in `dtype`.

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
    read_json(folder / "config.json")
    checkpoint = Checkpoint(folder)
    with _understood(folder):
        sees = has_vision(checkpoint)
        refuse_quantization(checkpoint)
        read_decoder_config(checkpoint)
        if checkpoint.architecture in LLAVA:
            LlavaConfig.read(checkpoint)
    if Parts.TOKENIZER in parts:
        require_tokenizer(folder)
    if Parts.PROCESSOR in parts and sees:
        require_processor(folder)
    if Parts.WEIGHTS in parts:
        require_weights(folder)
        require_computable(device, dtype)
    return checkpoint


def require_computable(device: str, dtype: str) -> None:
    """Raises InvalidRequest if this machine does not have the device, or the device not the element type."""
    require_dtype(dtype, resolve_device(device))


def require_dtype(dtype: str, device: str) -> None:
    """Raises InvalidRequest for an element type that a resolved device does not compute in."""
    if dtype not in DTYPES:
        raise InvalidRequest(
            "UNSUPPORTED_DTYPE", f"--dtype {dtype}: it may be {', '.join(DTYPES)}", field="dtype"
        )
    if dtype == "float16" and device == "cpu":
        raise InvalidRequest(
            "UNSUPPORTED_DTYPE",
            "--dtype float16 needs a CUDA device: use bfloat16 on the CPU",
            field="dtype",
        )


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """A value of another type than the key has is a fault of the file, like all others."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{folder / 'config.json'} has a value that makes no sense: {error}",
            field="model",
        ) from error
