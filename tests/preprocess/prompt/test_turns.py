"""Earlier calls, their results, thoughts, documents and an open last message, as transformers renders them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import Message
from tests.support.preprocess.service import PreprocessMaker, RunningPreprocess, ids_of, text

# In the manner of Qwen3's.
TEMPLATE = """{%- for d in documents or [] %}<doc>{{ d.title }}: {{ d.text }}</doc>
{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content is defined %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- if call.function.arguments is string %}{{- call.function.arguments }}
        {%- else %}{{- call.function.arguments | tojson }}{% endif %}
        {{- '}\\n</tool_call>' + (call.id or '') }}
    {%- endfor %}
    {%- if m.tool_call_id %}{{- ' for ' + m.tool_call_id }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
CALLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "id": "call_1",
        "function": {"name": "f", "arguments": {"b": [1, {"a": "天气"}], "a": None}},
    },
    {"type": "function", "id": "call_2", "function": {"name": "g", "arguments": "{broken"}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": CALLS},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It is  "},
]
DOCUMENTS = [{"title": "T", "text": "x y"}, {"title": "U", "text": "天"}]


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(llama_folder, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def turns(messages: list[dict[str, Any]]) -> list[Message]:
    return [
        Message(
            role=message["role"],
            content=[text(message["content"])] if message["content"] else [],
            is_string=True,
            tool_calls_json=json.dumps(message["tool_calls"]) if "tool_calls" in message else "",
            tool_call_id=message.get("tool_call_id", ""),
            reasoning=message.get("reasoning_content", ""),
        )
        for message in messages
    ]


def expected(folder: Path, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False, **more)
    return ids


async def test_calls_results_thoughts_and_documents(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(folder, max_model_len=2048) as service:
        found = await service.chat(*turns(MESSAGES), documents_json=json.dumps(DOCUMENTS))
        ours = ids_of(found)
        opens: dict[str, Any] = {"add_generation_prompt": True}
        assert ours == expected(folder, MESSAGES, documents=DOCUMENTS, **opens)
        assert ours != expected(folder, MESSAGES, **opens)


@pytest.mark.parametrize("trims", [False, True])
async def test_the_last_message_is_gone_on_with(
    folder: Path, make_preprocess: PreprocessMaker, trims: bool
) -> None:
    if trims:
        source = TEMPLATE.replace("{{- m.content }}", "{{- m.content | trim }}")
        (folder / "chat_template.jinja").write_text(source)
    async with make_preprocess(folder, max_model_len=2048) as service:
        found = await service.chat(*turns(MESSAGES), continue_final_message=True)
        assert ids_of(found) == expected(folder, MESSAGES, continue_final_message=True)
        assert found.text.endswith("It is" if trims else "It is  ")
        both = {"continue_final_message": True, "add_generation_prompt": True}
        await _refused(service, "add_generation_prompt", MESSAGES, **both)


async def _refused(
    service: RunningPreprocess, field: str, messages: list[dict[str, Any]], **fields: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await service.chat(*turns(messages), **fields)
    assert caught.value.metadata["field"] == field


async def test_a_template_that_leaves_the_last_message_out_cannot_go_on_with_it(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    source = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}?"
    (folder / "chat_template.jinja").write_text(source)
    async with make_preprocess(folder, max_model_len=2048) as service:
        await _refused(service, "continue_final_message", MESSAGES, continue_final_message=True)


async def test_what_calls_say_is_never_a_control_token(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    def of(word: str) -> list[dict[str, Any]]:
        function = {"name": word, "arguments": {word: [word]}}
        call = {"type": "function", "id": word, "function": function}
        return [
            {"role": "assistant", "content": "", "reasoning_content": word, "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": word},
        ]

    async with make_preprocess(folder, max_model_len=2048) as service:
        plain = ids_of(await service.chat(*turns(of("word"))))
        ours = ids_of(await service.chat(*turns(of("<|im_end|>"))))
        control = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
        assert ours.count(control) == plain.count(control) > 0


async def test_names_of_calls_where_a_template_takes_nine_characters(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    check = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}"
    check += "{{ raise_exception('nine') }}{% endif %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(check + TEMPLATE)
    long = "call_r_0_0"
    messages = json.loads(json.dumps(MESSAGES).replace("call_1", long))
    messages[1]["tool_calls"][1]["id"] = "abcdefghi"
    async with make_preprocess(folder, max_model_len=2048) as service:
        found = (await service.chat(*turns(messages))).text
    name = found.partition("</tool_call>")[2][:9]
    assert name.isalnum() and f"sunny for {name}" in found and "</tool_call>abcdefghi" in found
