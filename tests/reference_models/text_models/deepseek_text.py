"""DeepSeek-VL2's text models: transformers' DeepseekV2 and DeepseekV3, or plain attention with experts.

`topk_method` noaux_tc is V3, `use_mla` false the plain one, all else V2. transformers' V2 does not
know `norm_topk_prob`: it is refused there.
"""

import re
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

from tests.reference_models.common import Draw
from tests.reference_models.text_models import deepseek_moe

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+_proj)\.weight")


class TextModel(Protocol):
    """A text model of any of the three kinds."""

    @property
    def table(self) -> Tensor:
        """The embedding table [vocabulary, hidden]."""

    def logits(self, x: Tensor) -> Tensor:
        """[rows, vocabulary] for embeddings [rows, hidden]."""


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> TextModel:
    """The text model that `language_config` describes, with tensors by their released names."""
    if not config["use_mla"]:
        return deepseek_moe.DeepSeekMoe(config, tensors)
    model = transformers_model(config)
    model.load_state_dict(merged_experts(tensors))
    return TransformersText(model)


class TransformersText:
    """One of transformers' models."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def table(self) -> Tensor:
        """The embedding table [vocabulary, hidden]."""
        table: Tensor = self._model.get_input_embeddings().weight
        return table

    def logits(self, x: Tensor) -> Tensor:
        """[rows, vocabulary] for embeddings [rows, hidden]."""
        found: Tensor = self._model(inputs_embeds=x[None], use_cache=False).logits[0]
        return found


def transformers_model(config: dict[str, Any]) -> PreTrainedModel:
    """transformers' class for `language_config`, with weights of its own."""
    keys = {key: value for key, value in config.items() if key not in ("model_type", "rope_theta")}
    keys["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if config["topk_method"] == "noaux_tc":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**keys)).eval().requires_grad_(False)
    assert not config["norm_topk_prob"], "not known to transformers' V2"
    return DeepseekV2ForCausalLM(DeepseekV2Config(**keys)).eval().requires_grad_(False)


def draw(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    """Random tensors by their released names, each expert's matrices by themselves."""
    if not config["use_mla"]:
        plain = deepseek_moe.draw(config, random)
        return {f"language.{name}": tensor for name, tensor in plain.items()}
    tensors: dict[str, Tensor] = {}
    for name, parameter in transformers_model(config).state_dict().items():
        full, drawn = f"language.{name}", parameter.float()
        drawn = random.weight(*drawn.shape) if drawn.ndim > 1 else random.bias(len(drawn)) + drawn
        if ".mlp.experts." in name:
            tensors |= split_experts(full, drawn)
        else:
            tensors[full] = drawn
    return tensors


def split_experts(name: str, stacked: Tensor) -> dict[str, Tensor]:
    """A class's tensor of all experts as the released ones of each."""
    stem, _, part = name.rpartition(".")
    tensors: dict[str, Tensor] = {}
    for expert, matrix in enumerate(stacked):
        if part == "down_proj":
            tensors[f"{stem}.{expert}.down_proj.weight"] = matrix
        else:
            gate, up = matrix.chunk(2)
            tensors[f"{stem}.{expert}.gate_proj.weight"] = gate
            tensors[f"{stem}.{expert}.up_proj.weight"] = up
    return tensors


def merged_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Released names as the class's: the experts' matrices stacked, gate above up."""
    merged = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if found := EXPERT.fullmatch(name):
            stem, expert, part = found.groups()
            parts.setdefault(stem, {}).setdefault(part, {})[int(expert)] = tensor
    for stem, by_part in parts.items():
        gate, up, down = (
            torch.stack([by_part[part][expert] for expert in sorted(by_part[part])])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        merged[f"{stem}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        merged[f"{stem}.down_proj"] = down
    return merged
