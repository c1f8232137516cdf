"""LoRA adapters (Hu et al., 2021) as PEFT saves them, for the linear layers of the decoder's layers."""

import re
from collections.abc import Callable

import structlog

from services.decoder.devices.base.adapters import Addition, LayerAdditions
from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import language_names
from services.decoder.models.adapters import Adapter, pack_addition
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.tensor_file import open_tensors
from shared.errors import InvalidRequest
from shared.lora.adapter import WEIGHTS, LoraAdapter
from shared.model_config.decoder import DecoderConfig
from shared.weights.linear_weight import in_memory

_LINEAR = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")

log = structlog.get_logger(__name__)


def load_lora(
    called: str,
    adapter: LoraAdapter,
    checkpoint: Checkpoint,
    canonical: Callable[[str], str],
    config: DecoderConfig,
    ops: BaseOps,
) -> Adapter:
    """Of all layers, of several ranks this one's share. canonical: see `Llama.canonical`; called: what errors call
    it. Modules are spelt as in the checkpoint, or as in the classes of transformers.

    Raises InvalidRequest naming what the decoder has no place for, such as a layer of the vision encoder.
    """
    own_name = language_names(checkpoint)
    layers: list[list[Addition]] = [[] for _ in range(config.num_layers)]
    try:
        file = open_tensors(adapter.folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise _refused(called, f"{WEIGHTS} cannot be read: {error}") from error
    for module, linear in adapter.linears.items():
        own = own_name(f"{module}.weight")
        if own is None:
            raise _refused(
                called, f"{module} is the vision encoder's, and only the decoder is adapted"
            )
        place = _LINEAR.fullmatch(canonical(own).removesuffix(".weight"))
        if place is None or int(place[1]) >= config.num_layers:
            raise _refused(called, f"{module} is no linear layer of the decoder's layers")
        down = in_memory(file.tensor(linear.down), name=linear.down)
        up = in_memory(file.tensor(linear.up).float() * linear.scale, name=linear.up)
        layers[int(place[1])].append(pack_addition(place[2], down, up, config, ops))
    log.info("read adapter", adapter=called, lora_id=adapter.lora_id, linears=len(adapter.linears))
    return Adapter([LayerAdditions.of(layer) for layer in layers])


def _refused(called: str, why: str) -> InvalidRequest:
    return InvalidRequest("BAD_ADAPTER", f"{called}: {why}", field="lora_modules")
