"""Linear layers of a class whose weights stay in the checkpoint until they are packed, one by one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader
from shared.weights.gguf_layers import GgufLayers
from shared.weights.linear_weight import LinearWeight, StoredWeight
from shared.weights.number_weights import NumberWeights


class TakenLinear(nn.Module):
    """In the place of a `nn.Linear`, as which it computes until it is packed. Its bias is loaded by transformers."""

    bias: Tensor | None

    def __init__(self, layer: nn.Linear, taken: LinearWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.taken, self.dtype = taken, dtype
        self.out_features, self.in_features = taken.out, taken.inputs
        self.register_parameter("bias", layer.bias)
        self._dense: Tensor | None = None
        self._is_hf_initialized = True

    @property
    def weight(self) -> Tensor:
        """[out, inputs]: the mapped file, or what was converted, which is kept until the layer is packed. The numbers
        of codes are made each time."""
        if self._dense is not None:
            return self._dense
        found = self.taken.dense(self.dtype)
        if not self.taken.is_coded:
            self._dense = found
        return found

    def keep(self, taken: LinearWeight, bias: Tensor | None) -> None:
        """A part of the layer in its place."""
        self.taken, self._dense = taken, None
        self.out_features, self.in_features = taken.out, taken.inputs
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., out]."""
        weight = self.weight.to(x.device)
        if self._dense is not None:
            self._dense = weight
        return F.linear(x, weight, self.bias)


def take_linears(
    model: Any, checkpoint: Checkpoint, dtype: torch.dtype, key_mapping: dict[str, str] | None
) -> None:
    """Puts a `TakenLinear` in the place of each linear layer whose weight is one tensor of the checkpoint, whatever
    transformers calls it there, or is stored as codes: it is the numbers of these then, but for blocks of GGUF files,
    which stay. The others transformers loads: those that it makes of several tensors or keeps in another type, those
    that hang in several places, and those that share their weight."""
    numbers = NumberWeights.of(checkpoint)
    stored = _taken_names(model, numbers or checkpoint, key_mapping)
    reader = WeightReader(checkpoint, set(stored.values()) & set(checkpoint.names()))
    layers = dict(_own_linears(model))
    blocks = None
    if checkpoint.is_gguf:
        blocks = GgufLayers(checkpoint, {f"{path}.weight": name for path, name in stored.items()})
    for path, name in stored.items():
        layer = layers[path]
        shape = (layer.out_features, layer.in_features)
        taken: LinearWeight | None = None
        if blocks is not None:
            taken = blocks.take(path, *shape, None, reader)
        elif numbers is not None:
            taken = numbers.take_linear(name)
        taken = taken or StoredWeight(path, *shape, None, partial(reader.part, name))
        parent, _, own = path.rpartition(".")
        model.get_submodule(parent)._modules[own] = TakenLinear(layer, taken, dtype)


def _taken_names(
    model: Any, tensors: Checkpoint | NumberWeights, key_mapping: dict[str, str] | None
) -> dict[str, str]:
    """Of the layers that `take_linears` puts something in the place of the names in the checkpoint, by their paths."""
    layers = dict(_own_linears(model))
    return {
        path: name
        for path, name in _stored_names(model, tensors.names(), key_mapping).items()
        if path in layers
        and tensors.shape(name) == (layers[path].out_features, layers[path].in_features)
    }


def has_codes(model: nn.Module) -> bool:
    """Whether any of its layers is to be computed with codes."""
    return any(
        isinstance(module, TakenLinear) and module.taken.is_coded for module in model.modules()
    )


def _own_linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Each layer that hangs in one place, with a weight of its own and of the model's type."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    others = {
        name
        for module in model.modules()
        for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in getattr(module, key, None) or ()
    }
    for path, module in model.named_modules():
        if (
            type(module) is nn.Linear
            and places[id(module)] == 1
            and f"{path}.weight" not in shared
            and not any(name in path for name in others)
        ):
            yield path, module


def _stored_names(
    model: Any, names: Sequence[str], key_mapping: dict[str, str] | None
) -> dict[str, str]:
    """The names, of those in the checkpoint, of weights that become a module's as they are, by the module's path."""
    mapping = get_model_conversion_mapping(model, key_mapping)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = model.state_dict()
    found: dict[str, list[str]] = {}
    for name in names:
        renamed, converted = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if renamed not in known and name in known:
            renamed, converted = rename_source_key(name, [], [], model.base_model_prefix, known)
        path, _, kind = renamed.rpartition(".")
        if renamed in known:
            found.setdefault(path, []).extend([name] if kind == "weight" and not converted else [])
    return {path: names[0] for path, names in found.items() if len(names) == 1}
