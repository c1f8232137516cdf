"""A checkpoint as its transformers class loads it, without the parts that other services own."""

from functools import partial
from itertools import chain
from typing import Any

import torch
import transformers
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from services.decoder.models.generic.linears.taken_linear import take_linears
from services.families import registry
from services.families.generic import ATTENTION_LAYERS, require_trusted
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import understood
from shared.checkpoint.refusal import unsupported
from shared.weights.class_weights import load_class


def find_class(checkpoint: Checkpoint, trust_remote_code: bool) -> type[Any]:
    """The class that the checkpoint names. Raises InvalidRequest for one that transformers does not have, unless the
    checkpoint brings it and its code is trusted."""
    found: type[Any] | None = getattr(transformers, checkpoint.architecture, None)
    if found is not None:
        return found
    require_trusted(checkpoint, trust_remote_code)
    remote = (checkpoint.config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if remote is None:
        raise unsupported(checkpoint, f"transformers {transformers.__version__} has no such class")
    with understood(checkpoint):
        brought: type[Any] = get_class_from_dynamic_module(remote, str(checkpoint.folder))
    return brought


def require_served(checkpoint: Checkpoint, kind: type[Any], config: Any) -> None:
    """Raises InvalidRequest for what is known not to run without reading a weight."""
    text = config.get_text_config(decoder=True)
    layers = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS
    if layers:
        raise unsupported(checkpoint, f"it has layers of {', '.join(sorted(layers))}")
    if getattr(kind, "_is_stateful", False):
        raise unsupported(checkpoint, "it has recurrent layers")
    if not hasattr(kind, "_can_set_attn_implementation"):
        raise unsupported(checkpoint, f"{kind.__name__} is no model that generates text")


def load_model(checkpoint: Checkpoint, kind: type[Any], config: Any, dtype: torch.dtype) -> Any:
    """The class with its weights, in its own eager attention; those of linear layers are read when they are asked for
    (`TakenLinear`). Only tensors of the decoder and the output matrix are read. Raises InvalidRequest for a checkpoint
    that lacks one of them."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    foreign = foreign_modules(kind, config)
    if encoder := registry.find(checkpoint).overrides.get("encoder_path"):
        foreign.append(encoder)
    prepare = partial(take_linears, checkpoint=checkpoint, dtype=dtype, key_mapping=None)
    model = load_class(checkpoint, kind, config, foreign, dtype, prepare, **eager)
    _copy_small(model)
    return model


def _copy_small(model: nn.Module) -> None:
    """Norms and the like into memory of their own: else each keeps its shard mapped when all that is packed is gone."""
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data = parameter.data.clone()


def foreign_modules(kind: type[Any], config: Any) -> list[str]:
    """Submodules and parameters of a composite model that neither are nor hold its language layers or its output
    matrix."""
    if config.get_text_config(decoder=True) is config:
        return []
    with torch.device("meta"):
        empty = kind._from_config(config, attn_implementation="eager")
    kept = [
        path_of(empty, module) for module in (language_layers(empty), empty.get_output_embeddings())
    ]
    found = []
    for path in dict(chain(empty.named_modules(), empty.named_parameters())):
        parent = path.rpartition(".")[0]
        inside = any(_below(path, own) or _below(own, path) for own in kept)
        if path and not inside and any(_below(own, parent) for own in kept):
            found.append(path)
    return found


def language_layers(model: Any) -> Any:
    """The submodule from embedding rows to last hidden rows. `get_decoder` of some classes gives the model itself, of
    others an output matrix of that name: then it is the model inside the class."""
    found = model.get_decoder()
    if found is not model and isinstance(found, transformers.PreTrainedModel):
        return found
    inner = [child for child in model.children() if isinstance(child, transformers.PreTrainedModel)]
    return inner[0] if inner else model


def path_of(model: nn.Module, module: nn.Module | None) -> str:
    """Where a module hangs in a model; "" for one that does not."""
    return next((path for path, found in model.named_modules() if found is module), "")


def _below(path: str, other: str) -> bool:
    """Whether `path` is `other` or inside it."""
    return not other or path == other or path.startswith(f"{other}.")
