"""Which part of a class's linear layers one of several ranks computes: as the class's configuration says for tensor
parallelism (`base_model_tp_plan` of transformers). A rank has the heads and units that `Share` gives it."""

import re
from typing import Any

from torch import Tensor, nn

from services.decoder.models.generic.linears.taken_linear import TakenLinear
from services.decoder.ranks.rank_group import RankGroup

# How a layer may be divided: by its outputs; by its inputs, so that its results are summands; not at all.
_OUTPUTS, _INPUTS = "colwise", "rowwise"
_WHOLE = "replicated_with_grad_allreduce"
# Experts whose results are summands, and the gates above what they gate of each (`experts.py`).
_EXPERTS, _HALVES = "moe_tp_experts", "packed_colwise"


def undivided(config: Any, ranks: int) -> str:
    """Why a model of this configuration cannot be divided among so many ranks; empty where it can."""
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        return "no base_model_tp_plan in the configuration of its class"
    foreign = {style for name, style in plan.items() if not _is_served(name, style)}
    if foreign:
        return (
            f"layers that are divided in a way which is not served ({', '.join(sorted(foreign))})"
        )
    heads = text.num_attention_heads
    for count, what in (
        (heads, "attention heads"),
        (getattr(text, "num_key_value_heads", None) or heads, "heads of keys and values"),
        (getattr(text, "intermediate_size", None) or 0, "units between the layers of its MLP"),
    ):
        if any(number % ranks for number in (count if isinstance(count, list) else [count])):
            return f"{count} {what}, which do not divide by it"
    if text.vocab_size < ranks * ranks:
        return f"{text.vocab_size} tokens in its vocabulary, too few for so many"
    return ""


def _is_served(name: str, style: str) -> bool:
    return style in (_OUTPUTS, _INPUTS, _WHOLE, _EXPERTS) or (
        style == _HALVES and name.endswith(".experts.gate_up_proj")
    )


def divides_experts(config: Any) -> bool:
    """Whether each rank has a part of every expert."""
    return _EXPERTS in config.get_text_config(decoder=True).base_model_tp_plan.values()


def divide(layers: nn.Module, config: Any, ranks: RankGroup) -> int:
    """Leaves of the weights in `layers` this rank's part. Returns how many sums of all ranks a forward makes."""
    plan = config.get_text_config(decoder=True).base_model_tp_plan
    styles = [
        (re.compile(name.replace(".", r"\.").replace("*", r"\d+")), plan[name]) for name in plan
    ]
    share, sums = ranks.share, 0
    for path, module in list(layers.named_modules()):
        style = next((style for pattern, style in styles if pattern.fullmatch(path)), None)
        if type(module) not in (nn.Linear, TakenLinear):
            continue
        if style == _OUTPUTS and type(module) is TakenLinear:
            part = [share.range(module.out_features)]
            bias = None if module.bias is None else module.bias[slice(*part[0])]
            module.keep(module.taken.shard("out", part), bias)
        elif style == _OUTPUTS:
            first, last = share.range(module.out_features)
            _keep(module, module.weight[first:last])
            if module.bias is not None:
                module.bias = _parameter(module.bias[first:last])
        elif style == _INPUTS:
            first, last = share.range(module.in_features)
            if type(module) is TakenLinear:
                module.keep(module.taken.shard("in", [(first, last)]), module.bias)
            else:
                _keep(module, module.weight[:, first:last])
            if share.rank:  # it is added once
                module.register_parameter("bias", None)
            parent, _, name = path.rpartition(".")
            setattr(layers.get_submodule(parent), name, _Summed(module, ranks))
            sums += 1
    return sums


class _Summed(nn.Module):
    """A layer of which each rank computes a summand."""

    def __init__(self, part: Any, ranks: RankGroup) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks

    @property
    def weight(self) -> Tensor:
        """For those who ask for its type."""
        found: Tensor = self.part.weight
        return found

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs of this rank] to [..., out]."""
        own: Tensor = self.part(x)
        return self._ranks.sum(own.reshape(-1, own.shape[-1]).contiguous()).view(own.shape)


def _keep(module: nn.Linear, weight: Tensor) -> None:
    module.weight = _parameter(weight)
    module.out_features, module.in_features = weight.shape


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach(), requires_grad=False)
