"""A tiny random checkpoint of any type that transformers registers as a causal language model."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.checkpoints.options import randomise, tokenizer
from tests.support.tiny_configs import tiny_config

_MOST_PARAMETERS = 20_000_000


def build(folder: Path, kind: str) -> Path:
    """Writes it. Raises whatever transformers does about sizes that do not fit each other, and ValueError for a model
    that does not become small."""
    words = tokenizer()
    config = tiny_config(CONFIG_MAPPING[kind])
    name: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class: Any = getattr(transformers, name if isinstance(name, str) else name[0])
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    for part in _parts(config):
        if "vocab_size" in part.to_dict():
            part.vocab_size = len(words)
    with torch.device("meta"):
        empty = model_class._from_config(config)
    if sum(parameter.numel() for parameter in empty.parameters()) > _MOST_PARAMETERS:
        raise ValueError("it is not tiny")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = model_class._from_config(config)
    randomise(model, seed=0)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def _parts(config: Any) -> list[Any]:
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for part in parts if isinstance(part, PreTrainedConfig))]
