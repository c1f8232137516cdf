"""Partial LoRA (Dong et al., 2024, InternLM-XComposer2): low-rank additions to a layer's linear layers, for the tokens
alone that take an embedding row. A checkpoint has them as `Plora_A` [rank, inputs] and `Plora_B` [outputs, rank].
"""

import re
from collections.abc import Callable

from services.decoder.devices.base.adapters import Addition, LayerAdditions
from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import LanguageWeights
from services.decoder.models.adapters import Adapter, pack_addition, whole_linears
from shared.checkpoint.files import read_json
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.decoder import DecoderConfig

# The factor of the additions to a linear layer, by its canonical name in a decoder layer.
Scale = Callable[[str], float]

_QKV = "self_attn.qkv_proj"
_LINEARS = (_QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_TILED = re.compile(r"plora_glb_(GN|gn)$")  # a tensor that 4KHD alone has


def scales(checkpoint: Checkpoint) -> Scale:
    """By adapter_config.json, lora_alpha / r. Without it those that the code of the released models has: InternLM-
    XComposer2-4KHD's queries, keys and values have a rank of 8 and an alpha of 16, elsewhere both are equal."""
    path = checkpoint.folder / "adapter_config.json"
    if not path.is_file():
        doubles = any(_TILED.match(name) for name in checkpoint.names())
        return lambda name: 2.0 if doubles and name == _QKV else 1.0
    adapter = read_json(path)
    try:
        factor = float(adapter["lora_alpha"]) / int(adapter["r"])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"{path} has no numbers lora_alpha and r", field="model"
        ) from error
    return lambda name: factor


def load_adapter(
    weights: LanguageWeights, config: DecoderConfig, ops: BaseOps, scale: Scale
) -> Adapter:
    """Of all layers, of several ranks this one's share. Raises as `LanguageWeights.take` does."""
    whole = whole_linears(config)

    def load(i: int, name: str) -> Addition:
        place = whole.place(name.rpartition(".")[2])
        factor, stored = scale(name), f"layers.{i}.{name}"
        rank = weights.shape(f"{stored}.Plora_A.weight")[0]
        down = weights.take_linear(f"{stored}.Plora_A", rank, place.inputs)
        out = place.last - place.first
        up = weights.take_linear(f"{stored}.Plora_B", out, rank, factor=factor)
        return pack_addition(place.name, down, up, config, ops)

    return Adapter(
        [LayerAdditions.of(load(i, name) for name in _LINEARS) for i in range(config.num_layers)]
    )
