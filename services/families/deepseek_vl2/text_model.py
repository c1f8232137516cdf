"""DeepSeek-VL2's text model as `language_config` describes it: which class of transformers it is, and its settings."""

from collections.abc import Mapping
from typing import Any

from services.families.deepseek_vl2.refusal import require
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from shared.model_backends import ModelBackend
from shared.model_config.decoder import TextSizes, refuse_quantization

# Of the checkpoint's own configuration class, whose defaults are not those of transformers.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
# The only values that are served.
_ONLY = {"moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False}
_EXPERTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
# What the classes of transformers do for each way to choose experts.
_V2 = {"scoring_func": "softmax", "norm_topk_prob": False}
_V3 = {"scoring_func": "sigmoid"}
_CLASSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "greedy": ("DeepseekV2ForCausalLM", _V2),
    "group_limited_greedy": ("DeepseekV2ForCausalLM", _V2),
    "noaux_tc": ("DeepseekV3ForCausalLM", _V3),
}
# Without latent attention: DeepSeek-V2's class around other attention, which has no settings but these.
_PLAIN = "PlainDeepseekV2ForCausalLM"
_ONLY_PLAIN = {"rope_scaling": None}
# Keys that say of which class and file the settings are.
_NAMES = {"architectures", "auto_map", "model_type", "torch_dtype", "transformers_version"}


def read(checkpoint: Checkpoint) -> TextSizes:
    """Raises InvalidRequest for what transformers' classes do not have."""
    refuse_quantization(checkpoint, ModelBackend.TRANSFORMERS)
    _, values = class_and_settings(checkpoint)
    return TextSizes(
        vocab_size=int(values["vocab_size"]),
        hidden_size=int(values["hidden_size"]),
        num_layers=int(values["num_hidden_layers"]),
        max_position_embeddings=int(values["max_position_embeddings"]),
    )


def class_and_settings(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """The class's name and what its configuration is made of. Raises InvalidRequest as `read` does."""
    given = {key: value for key, value in checkpoint.text_config.items() if key not in _NAMES}
    values = {**_DEFAULTS, **given}
    part = "language_config"
    require(checkpoint, part, values, _ONLY)
    method = str(values["topk_method"])
    if method not in _CLASSES:
        raise bad_option(
            checkpoint, f"{part}.topk_method {method!r}; {', '.join(_CLASSES)} are served"
        )
    name, only = _CLASSES[method]
    require(checkpoint, f"with topk_method {method}, {part}", values, only)
    for key in _EXPERTS:
        if not values.get(key):
            raise bad_option(checkpoint, f"{part} has no {key}")
    groups = {key: values.get(key) or 1 for key in ("n_group", "topk_group")}
    if values.get("use_mla", True):
        return name, {**values, **groups}
    return _PLAIN, {**values, **groups, **_heads(checkpoint, name, values)}


def _heads(checkpoint: Checkpoint, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of ordinary attention heads, by the names of latent attention, whose configuration it is."""
    part = "with use_mla False, language_config"
    require(checkpoint, part, values, _ONLY_PLAIN)
    if not name.startswith("DeepseekV2"):
        raise bad_option(checkpoint, f"{part}.topk_method {values['topk_method']!r} is not served")
    hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    if hidden % heads:
        raise bad_option(checkpoint, f"{part}.num_attention_heads {heads} does not divide {hidden}")
    side = hidden // heads
    latent = dict.fromkeys(("qk_rope_head_dim", "v_head_dim", "kv_lora_rank"), side)
    return {**latent, "qk_nope_head_dim": 0, "q_lora_rank": None}
