"""Half of a checkpoint as its transformers class loads it: without the modules that another service owns."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from shared.checkpoint.folder import QUANTIZATION_KEYS, Checkpoint
from shared.checkpoint.refusal import unsupported
from shared.errors import InvalidRequest


def model_class(checkpoint: Checkpoint) -> type[Any]:
    """The class that the checkpoint names. Raises InvalidRequest for one that transformers does not have."""
    found: type[Any] | None = getattr(transformers, checkpoint.architecture, None)
    if found is None:
        raise unsupported(checkpoint, f"transformers {transformers.__version__} has no such class")
    return found


def read_config(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Any:
    """As transformers reads it, with the defaults of its class, but for what it says of quantized weights: these are
    read as numbers here. Raises InvalidRequest for one that it cannot read."""
    with understood(checkpoint):
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        for part in (config, config.get_text_config(decoder=True)):
            for key in QUANTIZATION_KEYS:
                vars(part).pop(key, None)
        return config


def decoder_paths(kind: type[Any], config: Any) -> list[str]:
    """Where the language layers and the output matrix hang in the class."""
    with torch.device("meta"):
        empty = kind._from_config(config)
    own = [empty.get_decoder(), empty.get_output_embeddings()]
    found = [path for path, module in empty.named_modules() if any(module is one for one in own)]
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


def other_than_encoder(kind: type[Any], config: Any, encoder: str) -> list[str]:
    """What an encoder at a path inside the language layers does not need: all of them but the embedding table."""
    with torch.device("meta"):
        empty = kind._from_config(config)
    owner = encoder.rpartition(".")[0]
    kept = (empty.get_submodule(encoder), empty.get_input_embeddings())
    inside = empty.get_submodule(owner).named_children()
    found = [f"{owner}.{name}" for name, module in inside if all(module is not own for own in kept)]
    return [*found, *(path for path in decoder_paths(kind, config) if path != owner)]


def load_without(
    checkpoint: Checkpoint,
    kind: type[Any],
    config: Any,
    left_out: Sequence[str],
    dtype: torch.dtype,
    prepare: Callable[[Any], None] = lambda model: None,
    tensors: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The model with empty modules, and no parameters, at some paths: their tensors have no place to go and are not
    read. `prepare` gets it before anything is loaded; `tensors`: what to load in the place of those of the files, by
    their names; `options` are those of `from_pretrained`.

    Raises InvalidRequest for a checkpoint that lacks one of the other tensors.
    """

    def create(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        for path in left_out:
            owner, _, name = path.rpartition(".")
            _leave_out(self.get_submodule(owner), name)
        prepare(self)

    part: Any = type(kind.__name__, (kind,), {"__init__": create, "__module__": kind.__module__})
    with understood(checkpoint), _quiet():
        model, report = part.from_pretrained(
            checkpoint.folder if tensors is None else None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise InvalidRequest(
            "BAD_CHECKPOINT",
            f"{checkpoint.folder}: the checkpoint lacks {', '.join(missing[:5])}{more}",
            field="model",
        )
    return model.eval().requires_grad_(False)


def untied(config: Any) -> Any:
    """Without the tie of embedding and output matrix, of which at least one is left out."""
    found = copy.deepcopy(config)
    for part in (found, found.get_text_config(decoder=True)):
        part.tie_word_embeddings = False
    return found


def _leave_out(owner: Any, name: str) -> None:
    if name not in owner._parameters:
        owner._modules[name] = nn.Module()
        return
    initialize = owner._init_weights
    owner._parameters[name] = None
    # The class would draw it.
    owner._init_weights = lambda module: None if module is owner else initialize(module)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without a list of the tensors that are left out."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def understood(checkpoint: Checkpoint) -> Iterator[None]:
    """Whatever transformers raises about a checkpoint is a fault of the checkpoint."""
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as error:
        raise unsupported(checkpoint, f"transformers says: {error}") from error
