"""DeepSeek-V2 with ordinary attention heads in the place of latent ones (`use_mla` false): what the smallest of the
DeepSeek-VL2 models has, whose own code takes Llama's attention for it."""

from typing import Any

from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding


class PlainDeepseekV2ForCausalLM(DeepseekV2ForCausalLM):  # type: ignore[misc]
    """DeepSeek-V2's experts and norms around Llama's attention. The configuration's `head_dim` is that of Llama."""

    # transformers reads there whether attention and experts can be replaced.
    __module__ = DeepseekV2ForCausalLM.__module__

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = LlamaAttention(config, index)
        self.model.rotary_emb = LlamaRotaryEmbedding(config)
