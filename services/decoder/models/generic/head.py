"""From the last hidden rows to logits: by the output matrix where that is all, else by the class's own forward."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.decoder.devices.base.largest import first_largest
from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.generic.linears.taken_linear import TakenLinear
from services.decoder.steps.attention_meta import Packed
from shared.weights.linear_weight import LinearWeight, in_memory

_ROWS = 3


class Head(ABC):
    """float32 logits of hidden rows."""

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """[rows, vocabulary] of [rows, H]."""

    @property
    def sketched_rows(self) -> int:
        """See `DecoderModel.sketched_rows`."""
        return 0

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderModel.largest`."""
        return first_largest(self.logits(rows))


class MatrixHead(Head):
    """A product with the output matrix, nothing else; each of several ranks computes a part of the outputs."""

    def __init__(self, ops: BaseOps, matrix: LinearWeight) -> None:
        self._ops, self._outputs = ops, matrix.out
        self._packed = ops.pack_head(ops.share.outputs(matrix))

    def logits(self, rows: Tensor) -> Tensor:
        """See `Head.logits`."""
        ranks, own = self._ops.ranks, self._ops.linear_float32(rows, self._packed)
        return own if ranks is None else ranks.join(own, self._outputs)

    @property
    def sketched_rows(self) -> int:
        """See `DecoderModel.sketched_rows`."""
        return self._ops.sketched_rows(self._packed)

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Without writing logits where the ops can do that."""
        ranks, own = self._ops.ranks, self._ops.largest(rows, self._packed)
        return own if ranks is None else ranks.largest(*own, self._outputs)


class ClassHead(Head):
    """The class's forward, its layers replaced by the rows: whatever it scales, caps or adds."""

    def __init__(self, model: nn.Module, given: "GivenRows") -> None:
        self._model, self._given = model, given

    def logits(self, rows: Tensor) -> Tensor:
        """See `Head.logits`."""
        self._given.rows = rows[None]
        try:
            found: Tensor = self._model(inputs_embeds=rows[None], use_cache=False).logits[0]
            return found.float()
        finally:
            self._given.rows = None


class GivenRows(nn.Module):
    """In the place of a model's layers: gives the rows it was given, and has their attributes that are no modules."""

    rows: Tensor | None = None

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        own = {name: value for name, value in vars(layers).items() if name not in vars(self)}
        vars(self).update(own)

    def forward(self, *_: Any, **__: Any) -> "_Output":
        """Whatever it is called with."""
        assert self.rows is not None
        return _Output(self.rows)


class _Output:
    """What a class looks for beside the last hidden rows, such as its routers' choices, is not there."""

    def __init__(self, rows: Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _WideLinear(nn.Module):
    """An output matrix whose sums stay float32."""

    def __init__(self, ops: BaseOps, packed: Packed) -> None:
        super().__init__()
        self._ops, self._packed = ops, packed

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._ops.linear_float32(rows, self._packed).view(*x.shape[:-1], -1)


def in_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Of logits [rows, outputs] those of `size` tokens: the last ones, which have an embedding and no output, are never
    chosen."""
    missing = size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits


def make_head(model: Any, layers: str, ops: BaseOps) -> Head:
    """For a model whose layers are its submodule `layers`; they are taken out of it.

    The class's forward is what decides. Where it cannot run without its layers, the output matrix is taken, which
    the comparison at start then finds right or wrong.
    """
    output = model.get_output_embeddings()
    name = layers.partition(".")[0]
    given = GivenRows(getattr(model, name))
    setattr(model, name, given)
    head = ClassHead(model, given)
    rows = torch.randn(_ROWS, output.weight.shape[1], generator=torch.Generator().manual_seed(0))
    rows = rows.to(ops.device, ops.dtype)
    with torch.inference_mode():
        try:
            found = head.logits(rows)
        except Exception:  # whatever a class does with layers that are none
            return MatrixHead(ops, _matrix(output))
        plain = output.bias is None and torch.equal(found, output(rows).float())
    if plain:
        matrix = MatrixHead(ops, _matrix(output))
        model.set_output_embeddings(nn.Identity())
        return matrix
    bias = None if output.bias is None else output.bias.detach()
    weight = _matrix(output)
    weight.bias = bias
    packed = ops.pack(weight)
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is output:
                parent._modules[name] = _WideLinear(ops, packed)
    return head


def _matrix(output: Any) -> LinearWeight:
    """The output matrix without a bias."""
    if type(output) is TakenLinear:
        return output.taken
    return in_memory(output.weight.detach(), name="output matrix")
