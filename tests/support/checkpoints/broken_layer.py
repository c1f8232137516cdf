"""Changes to the tensors of one quantized layer of a checkpoint, which then has to be refused by the tensor's name."""

from collections.abc import Callable, MutableMapping
from typing import TypeAlias

from torch import Tensor

LAYER = "model.layers.1.self_attn.k_proj"

TensorChange: TypeAlias = Callable[[MutableMapping[str, Tensor]], None]


def removed(part: str) -> TensorChange:
    """Takes a tensor of the layer away."""

    def change(tensors: MutableMapping[str, Tensor]) -> None:
        del tensors[f"{LAYER}.{part}"]

    return change


def replaced(part: str, value: Tensor) -> TensorChange:
    """Puts another tensor in the place of one of the layer's, or beside them."""

    def change(tensors: MutableMapping[str, Tensor]) -> None:
        tensors[f"{LAYER}.{part}"] = value

    return change
