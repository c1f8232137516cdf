"""The JSON files of a checkpoint that the pairs of a `.flm` make: Python's `str` of each value that its writer knew."""

import ast
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from shared.errors import InvalidRequest

_ARCHITECTURES = {
    "chatglm": "ChatGLMModel",
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen": "QWenLMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
}
_PROMPTS = ("pre_prompt", "user_role", "bot_role", "history_sep")
# Of the exporter, or of no meaning outside the process that wrote them.
_DROPPED = {
    *_PROMPTS,
    *("chat_template", "peft_size", "im_start_id", "im_end_id", "auto_map"),
    *("architectures", "dtype", "torch_dtype", "transformers_version"),
}
_GENERATION = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "chat_format"),
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty"),
)
_REFUSED = {
    **dict.fromkeys(("position_encoding_2d", "inner_hidden_size"), "ChatGLM-6B is not converted"),
    **dict.fromkeys(
        ("quantization_config", "quantization_bit"), "its weights were quantized before the export"
    ),
}
_LONGEST = 10_000  # characters of a value that is parsed
_FIXED = re.compile(r"<FLM_FIX_TOKEN_(\d+)>")


def model_config(pairs: Mapping[str, str], dtype: str) -> dict[str, Any]:
    """`config.json`. Raises InvalidRequest for a model that is not known, or whose weights are not plain."""
    kind = pairs.get("model_type")
    if kind not in _ARCHITECTURES:
        raise _refuse(f"model_type {kind!r} is none of {', '.join(_ARCHITECTURES)}")
    values = {key: _value(text) for key, text in pairs.items()}
    for key, reason in _REFUSED.items():
        if values.get(key):
            raise _refuse(f"{key} {pairs[key]!r}: {reason}")
    config: dict[str, Any] = {}
    for key, value in values.items():
        if (
            value is None
            or key in _DROPPED
            or key.startswith("tokenizer_")
            or key == "rope_scaling"
        ):
            continue
        if key.startswith("rope_scaling."):
            scaling = config.setdefault("rope_scaling", {})
            scaling[key.removeprefix("rope_scaling.")] = value
        elif key == "_name_or_path" or not key.startswith("_"):
            config[key] = value
    return {**config, "architectures": [_ARCHITECTURES[kind]], "torch_dtype": dtype}


def generation_config(pairs: Mapping[str, str]) -> dict[str, Any]:
    """`generation_config.json`. Qwen's chats end where a message does."""
    values = {key: _value(pairs[key]) for key in _GENERATION if key in pairs}
    if "im_end_id" in pairs:
        ends = (values.get("eos_token_id"), _value(pairs["im_end_id"]))
        values["eos_token_id"] = [end for end in ends if isinstance(end, int)]
    return {key: value for key, value in values.items() if value is not None}


def chat_template(pairs: Mapping[str, str], tokens: Mapping[int, str]) -> str | None:
    """The file's own, or one of its prompts, where it has them. `tokens`: control tokens by their ids.

    Raises InvalidRequest for a prompt with a token that there is not.
    """
    if given := pairs.get("chat_template"):
        return given
    if not any(pairs.get(key) for key in _PROMPTS):
        return None

    def token(found: re.Match[str]) -> str:
        text = tokens.get(int(found[1]))
        if text is None:
            raise _refuse(f"its prompts name the token {found[1]}, which is no control token")
        return text

    # As literals of Jinja, which reads the escapes of JSON.
    first, user, answer, behind = (
        json.dumps(_FIXED.sub(token, pairs.get(key, "")), ensure_ascii=False) for key in _PROMPTS
    )
    return (
        "{% for message in messages %}"
        f"{{% if loop.first %}}{{{{ {first} }}}}{{% endif %}}"
        "{% if message['role'] == 'user' %}"
        f"{{{{ {user} + message['content'] + {answer} }}}}"
        "{% elif message['role'] == 'assistant' %}"
        f"{{{{ message['content'] + {behind} }}}}"
        "{% else %}{{ raise_exception('there are messages of user and assistant alone') }}"
        "{% endif %}{% endfor %}"
    )


def tokenizer_config(
    pairs: Mapping[str, str], tokens: Mapping[int, str], template: str | None
) -> dict[str, Any]:
    """`tokenizer_config.json`: names of control tokens, and the chat template."""
    config: dict[str, Any] = {} if template is None else {"chat_template": template}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        ids = _value(pairs.get(f"{name}_id", "None"))
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and first in tokens:
            config[name] = tokens[first]
    return config


def require_ids(config: Mapping[str, Any], ids: Collection[int]) -> None:
    """Raises InvalidRequest if a token's id lies outside of the model's vocabulary."""
    size = config.get("padded_vocab_size") or config.get("vocab_size")
    if isinstance(size, int) and max(ids, default=-1) >= size:
        raise _refuse(f"its vocabulary has the id {max(ids)}, the model has {size} rows")


def _value(text: str) -> Any:
    """What Python's `str` was made of, if JSON has such values, else the text."""
    if len(text) > _LONGEST:
        return text
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


def _refuse(what: str) -> InvalidRequest:
    return InvalidRequest("UNSUPPORTED_FLM", what)
