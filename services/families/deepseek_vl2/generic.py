"""DeepSeek-VL2's decoder: its text model in transformers' code, which has no class for the whole."""

from functools import partial
from typing import Any

import torch
import transformers

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.generic.decoder import GenericDecoder
from services.decoder.models.generic.linears.taken_linear import take_linears
from services.families.deepseek_vl2.plain_attention import PlainDeepseekV2ForCausalLM
from services.families.deepseek_vl2.text_model import class_and_settings
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import understood
from shared.weights.class_weights import load_class

_PREFIX = r"^language\."


class DeepSeekVL2Decoder(GenericDecoder):
    """Tensors of the text model have its class's names behind a prefix."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        ops: BaseOps,
        max_model_len: int,
        trust_remote_code: bool = False,
        check: bool = True,
    ) -> GenericDecoder:
        """See `GenericDecoder.load`. No code of the checkpoint is run."""
        model = load_text_model(checkpoint, ops.dtype).to(ops.device)
        return cls.of_class(checkpoint, model, ops, max_model_len, check)


def load_text_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The class with its weights, in its own eager attention. Raises InvalidRequest for settings that it does not have,
    and for a checkpoint that lacks a tensor."""
    name, settings = class_and_settings(checkpoint)
    kind: type[Any] = getattr(transformers, name, PlainDeepseekV2ForCausalLM)
    with understood(checkpoint):
        config = kind.config_class.from_dict(settings)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    renamed = {_PREFIX: ""}
    prepare = partial(take_linears, checkpoint=checkpoint, dtype=dtype, key_mapping=renamed)
    return load_class(checkpoint, kind, config, (), dtype, prepare, key_mapping=renamed, **eager)
