"""The chat formats of InternVL that are ChatML, for checkpoints whose tokenizer has none."""

from shared.checkpoint.folder import Checkpoint

# By `template` of config.json: the system message of conversations without one.
_SYSTEM = {
    "Hermes-2": "Answer the questions.",
    "internlm2-chat": (
        "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"  # noqa: RUF001
    ),
    "internvl2_5": (
        "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"  # noqa: RUF001
    ),
}
_CHATML = (
    "{%% if messages[0]['role'] != 'system' %%}<|im_start|>system\n%s<|im_end|>{{ '\n' }}{%% endif %%}"
    "{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{{ '\n' }}"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant{{ '\n' }}{%% endif %%}"
)


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`."""
    system = _SYSTEM.get(str(checkpoint.config.get("template")))
    return None if system is None else _CHATML % system
