"""XComposer2's chat format, ChatML with the names that the tokenizer has for its marks."""

from shared.checkpoint.folder import Checkpoint
from shared.text.tokenizer_file import read_tokenizer

# The default of the models' own `chat`: VL's and 4KHD's, and that of the 7B model, which sees pictures in 224 pixels.
_NAME = "InternLM-XComposer (浦语·灵笔)"
_SYSTEM = (
    f"You are an AI assistant whose name is {_NAME}.\n"
    f"- {_NAME} is a%s conversational language model that is developed by Shanghai AI Laboratory"
    " (上海人工智能实验室). It is designed to be helpful, honest, and harmless.\n"
    f"- {_NAME} can understand and communicate fluently in the language chosen by the user such as English and 中文."
)
_7B_SYSTEM = _SYSTEM % ""
_VL_SYSTEM = (
    f"{_SYSTEM % ' multi-modality'}\n"
    f"- {_NAME} is capable of comprehending and articulating responses effectively based on the provided image."
)
_7B_SIDE = 224
_CHATML = (
    "{%% if messages[0]['role'] != 'system' %%}%(start)ssystem\n%(system)s%(end)s\n{%% endif %%}"
    "{%% for message in messages %%}%(start)s{{ message['role'] }}\n"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}<ImageHere>"
    "{%% elif part['type'] == 'text' %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "%(end)s\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}%(start)sassistant{{ '\n' }}{%% endif %%}"
)
_OLD = {"start": "[UNUSED_TOKEN_146]", "end": "[UNUSED_TOKEN_145]"}
_NEW = {"start": "<|im_start|>", "end": "<|im_end|>"}


def chat_template(checkpoint: Checkpoint) -> str:
    """See `Family.template`."""
    system = _7B_SYSTEM if checkpoint.config.get("img_size") == _7B_SIDE else _VL_SYSTEM
    return _CHATML % {**_marks(checkpoint), "system": system}


def stops(checkpoint: Checkpoint) -> tuple[str, ...]:
    """See `Family.stops`: the end of a turn (`InternLM-XComposer2`'s `chat`), where files name that of a text alone."""
    return (_marks(checkpoint)["end"],)


def _marks(checkpoint: Checkpoint) -> dict[str, str]:
    known = read_tokenizer(checkpoint.folder / "tokenizer.json").ids()
    return _NEW if _NEW["start"] in known else _OLD
