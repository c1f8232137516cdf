"""The plain DeepSeek text model against transformers' Llama and DeepseekV2's experts."""

from typing import Any

import torch
from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from tests.reference_models.common import Draw, below
from tests.reference_models.text_models.deepseek_moe import DeepSeekMoe, draw

CONFIG: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
}


def test_without_experts_it_is_llama() -> None:
    config = CONFIG | {"first_k_dense_replace": 2}
    tensors = draw(config, Draw(0))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    keys = {key: value for key, value in config.items() if key != "rope_theta"}
    theirs = LlamaForCausalLM(LlamaConfig(**keys, rope_parameters=rope)).eval()
    theirs.load_state_dict(tensors)
    embeds = 5 * Draw(9).weight(9, 64)
    with torch.no_grad():
        expected = theirs(inputs_embeds=embeds[None]).logits[0]
    ours = DeepSeekMoe(config, tensors).logits(embeds)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_experts_are_deepseek_v2s() -> None:
    part = below(draw(CONFIG, Draw(1)), "model.layers.1.mlp.")
    weights = {name: tensor for name, tensor in part.items() if not name.startswith("experts.")}
    stacked = {
        name: torch.stack([part[f"experts.{expert}.{name}.weight"] for expert in range(8)])
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    weights["experts.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], dim=1)
    weights["experts.down_proj"] = stacked["down_proj"]
    theirs = DeepseekV2Moe(DeepseekV2Config(**CONFIG, topk_method="greedy"))
    theirs.load_state_dict(weights)
    x = 5 * Draw(9).weight(7, 64)
    with torch.no_grad():
        expected = theirs(x[None])[0]
    ours = DeepSeekMoe(CONFIG, {}).experts(x, part)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
