"""The tensors of a quantized checkpoint for code that knows layers of numbers alone, such as that of transformers."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader
from shared.model_config.quantization import StoredCodes, read_stored_codes
from shared.weights.asked_tensors import Asked, Reads
from shared.weights.coded_layers import CodedLayers
from shared.weights.layouts.stored_layers import is_unused
from shared.weights.linear_weight import LinearWeight, as_numbers


class NumberWeights:
    """All tensors by their names in the checkpoint, and in the place of a layer's codes its `weight`. Nothing is read
    before it is asked for."""

    def __init__(self, checkpoint: Checkpoint, codes: StoredCodes) -> None:
        """Raises InvalidRequest, naming the tensor, for layers that are not stored as `codes` says, and for codes that
        are of no layer."""
        self._checkpoint = checkpoint
        names = {name: name for name in checkpoint.names() if not is_unused(codes, name)}
        self._coded = CodedLayers(checkpoint, codes, names)
        self._coded.require_no_others()
        self._reader = WeightReader(checkpoint, names.values())
        of_codes = {name for layer in self._coded for name in self._coded.tensors_of(layer)}
        self._plain = [name for name in names if name not in of_codes]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "NumberWeights | None":
        """None for a checkpoint that is not quantized, or is GGUF. Raises as the constructor does."""
        codes = None if checkpoint.is_gguf else read_stored_codes(checkpoint)
        return None if codes is None else cls(checkpoint, codes)

    def names(self) -> Sequence[str]:
        """Sorted."""
        return sorted((*self._plain, *(f"{layer}.weight" for layer in self._coded)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and layer in self._coded:
            return self._coded.sizes(layer)
        return self._checkpoint.shape(name)

    def take_linear(self, name: str) -> LinearWeight | None:
        """The weight of a layer of codes, by the tensor's name, without a bias; None for all others."""
        layer = name.removesuffix(".weight")
        if not name.endswith(".weight") or layer not in self._coded:
            return None
        return self._taken(layer)

    def state_dict(self, reads: Reads) -> dict[str, Asked]:
        """All of them, in float32 where they are made of codes."""
        found = {name: Asked(reads, partial(self._reader.tensor, name)) for name in self._plain}
        for layer in self._coded:
            found[f"{layer}.weight"] = Asked(reads, partial(self._numbers, layer))
            if self._coded.has_bias(layer):
                found[f"{layer}.bias"] = Asked(reads, partial(self._bias, layer))
        return found

    def finish(self) -> None:
        """Once everything is loaded: says how long that took."""
        self._reader.finish()

    def _numbers(self, layer: str) -> Tensor:
        return self._taken(layer).dense(torch.float32)

    def _bias(self, layer: str) -> Tensor:
        bias = self._taken(layer).bias
        assert bias is not None
        return bias

    def _taken(self, layer: str) -> LinearWeight:
        out, inputs = self._coded.sizes(layer)
        return as_numbers(self._coded.take(layer, out, inputs, None, self._reader))
