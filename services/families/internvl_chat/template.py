"""The chat formats of InternVL that are ChatML, for checkpoints whose tokenizer has none."""

from shared.checkpoint.folder import Checkpoint

_OLDER = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"  # noqa: RUF001
_NEWER = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"  # noqa: RUF001
# By `template` of config.json: the system message of conversations without one, and what ends each turn.
_FORMATS = {
    "Hermes-2": (_OLDER, ""),
    "internlm2-chat": (_OLDER, ""),
    "internvl2_5": (_NEWER, "{{ '\n' }}"),
}
_CHATML = (
    "{%% if messages[0]['role'] != 'system' %%}<|im_start|>system\n%(system)s<|im_end|>%(end)s{%% endif %%}"
    "{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>%(end)s"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant{{ '\n' }}{%% endif %%}"
)


def chat_template(checkpoint: Checkpoint) -> str | None:
    """See `Family.template`."""
    found = _FORMATS.get(str(checkpoint.config.get("template")))
    return None if found is None else _CHATML % dict(zip(("system", "end"), found, strict=True))
