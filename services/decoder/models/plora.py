"""Partial LoRA (Dong et al., 2024, InternLM-XComposer2): low-rank additions to a layer's linear layers, for the tokens
alone that take an embedding row. A checkpoint has them as `Plora_A` [rank, inputs] and `Plora_B` [outputs, rank].
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from services.decoder.devices.base.adapters import LayerSegments, Segment
from services.decoder.devices.base.attention_meta import Packed
from services.decoder.devices.base.ops import BaseOps
from services.decoder.loading.linear_weight import LinearWeight, in_memory
from services.decoder.loading.weights import LanguageWeights
from services.decoder.models.layer_weights import attended, own_heads, qkv_order
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.decoder import DecoderConfig
from shared.model_config.files import read_json

# The factor of the additions to a linear layer, by its canonical name in a decoder layer.
Scale = Callable[[str], float]

# From a layer's inputs to a few numbers, and from those to its outputs.
Pair = tuple[LinearWeight, LinearWeight]

_QKV = "self_attn.qkv_proj"
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


@dataclass(frozen=True)
class LayerAddition:
    """Of each linear layer of one decoder layer the two matrices."""

    qkv: tuple[Packed, Packed]
    output: tuple[Packed, Packed]
    gate: tuple[Packed, Packed]
    up: tuple[Packed, Packed]
    down: tuple[Packed, Packed]

    def on(self, rows: Tensor) -> LayerSegments:
        """Added for some rows [n] of a step."""
        linears = (self.qkv, self.output, self.gate, self.up, self.down)
        return LayerSegments(*([Segment(rows, *pair)] for pair in linears))


def load_addition(
    weights: LanguageWeights, i: int, config: DecoderConfig, ops: BaseOps, scale: Scale
) -> LayerAddition:
    """That of layer number `i`, of several ranks this one's share. Raises as `LanguageWeights.take` does."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))

    share = ops.share

    def pair(name: str, out: int, inputs: int) -> Pair:
        factor = scale(name)
        name = f"layers.{i}.{name}"
        rank = weights.shape(f"{name}.Plora_A.weight")[0]
        down = weights.take_linear(f"{name}.Plora_A", rank, inputs)
        up = weights.take(f"{name}.Plora_B.weight", out, rank)
        return down, in_memory(up if factor == 1 else up * factor)

    def by_outputs(pair: Pair) -> tuple[Packed, Packed]:
        down, up = pair
        return ops.pack(down), ops.pack(share.outputs(up))

    def by_inputs(pair: Pair) -> tuple[Packed, Packed]:
        down, up = pair
        return ops.pack(share.inputs(down)), ops.pack(up)

    qkv_down, qkv_up = pair(_QKV, queries + 2 * keys, hidden)
    fused = own_heads(qkv_up.reordered(qkv_order(config)), config, ops)
    output_down, output_up = pair("self_attn.o_proj", hidden, queries)
    return LayerAddition(
        qkv=(ops.pack(qkv_down), ops.pack(fused)),
        output=(ops.pack(attended(output_down, config, ops)), ops.pack(output_up)),
        gate=by_outputs(pair("mlp.gate_proj", inner, hidden)),
        up=by_outputs(pair("mlp.up_proj", inner, hidden)),
        down=by_inputs(pair("mlp.down_proj", hidden, inner)),
    )
