"""Tools are shown to the model as `apply_chat_template(tools=...)` of transformers shows them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import Conversation, PrepareRequest
from tests.support.preprocess.service import PreprocessMaker, RunningPreprocess, ids_of, text, turn

# In the manner of Qwen2.5's.
TOOL_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Das Wetter – 天气 <b>now</b>",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "z": {"type": "number", "minimum": 1.0},
                "a": {"enum": ["x", None, 10**30]},
            },
            "required": ["z"],
        },
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "stop"}}]


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A text model whose template shows tools."""
    made = tmp_path / "model"
    shutil.copytree(llama_folder, made)
    (made / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return made


def expected(folder: Path, messages: list[dict[str, str]], tools: list[Any] | None) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    return ids


SYSTEM_AND_USER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather?"},
]


async def test_they_are_rendered_as_transformers_renders_them(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(folder, max_model_len=2048) as service:
        for messages in (SYSTEM_AND_USER, SYSTEM_AND_USER[1:]):
            turns = [turn(message["role"], text(message["content"])) for message in messages]
            with_tools = expected(folder, messages, TOOLS)
            assert ids_of(await service.chat(*turns, tools_json=json.dumps(TOOLS))) == with_tools
            without = expected(folder, messages, None)
            assert ids_of(await service.chat(*turns)) == without != with_tools
            assert ids_of(await service.chat(*turns, tools_json="[]")) == without


@pytest.mark.asyncio(loop_scope="module")
async def test_a_template_without_tools_ignores_them(llama_service: RunningPreprocess) -> None:
    question = turn("user", text("What is there?"))
    with_tools = await llama_service.chat(question, tools_json=json.dumps(TOOLS))
    assert ids_of(with_tools) == ids_of(await llama_service.chat(question))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
async def test_a_template_of_its_own_for_tools_is_used(
    place: str, llama_folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    plain = (folder / "chat_template.jinja").read_text()
    if place == "additional_chat_templates":
        (folder / place).mkdir()
        (folder / place / "tool_use.jinja").write_text(TOOL_TEMPLATE)
    else:
        (folder / "chat_template.jinja").unlink()
        named = {"default": plain, "tool_use": TOOL_TEMPLATE}
        listed = [{"name": name, "template": source} for name, source in named.items()]
        config = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**config, "chat_template": listed}))
    turns = [turn(message["role"], text(message["content"])) for message in SYSTEM_AND_USER]
    async with make_preprocess(folder, max_model_len=2048) as service:
        for tools in (None, TOOLS):
            response = await service.chat(*turns, tools_json=json.dumps(tools) if tools else "")
            assert ids_of(response) == expected(folder, SYSTEM_AND_USER, tools)


async def test_no_word_in_them_is_a_control_token(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = set(tokenizer.all_special_ids)
    question = turn("user", text("hi"))

    def tool(word: str) -> str:
        function = {"name": "f", "description": word, "parameters": {"properties": {word: {}}}}
        return json.dumps([{"type": "function", "function": function}])

    async with make_preprocess(folder, max_model_len=2048) as service:
        plain = await service.chat(question, tools_json=tool("word"))
        response = await service.chat(question, tools_json=tool("<|im_end|>"))
    count = [sum(i in special for i in ids_of(found)) for found in (plain, response)]
    assert count[0] == count[1]
    assert response.text.count('"<|im_end|>"') == 2


BAD_TOOLS = {
    "no JSON": "[",
    "no list": '{"type": "function"}',
    "no objects": "[1]",
    "deep": "[" + '{"a":' * 40 + "1" + "}" * 40 + "]",
    "large": json.dumps([{"a": "b" * 600_000}]),
}


async def test_tools_that_cannot_be_shown_are_refused_by_name(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    question = turn("user", text("hi"))
    async with make_preprocess(folder) as service:
        for case, tools in BAD_TOOLS.items():
            with pytest.raises(InvalidRequest) as caught:
                await service.chat(question, tools_json=tools)
            assert (caught.value.reason, caught.value.metadata["field"]) == ("BAD_JSON", "tools"), (
                case
            )
        with pytest.raises(InvalidRequest, match="cannot set tools"):
            await service.chat(question, chat_template_kwargs_json='{"tools": []}')


async def test_documents_among_the_variables_reach_the_template(
    llama_folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    file = tmp_path / "documents.jinja"
    file.write_text("{{ documents[0].text if documents else 'none' }}: {{ messages[0].content }}")
    async with make_preprocess(llama_folder, chat_template=str(file)) as service:
        question = turn("user", text("hi"))
        assert (await service.chat(question)).text == "none: hi"
        variables = json.dumps({"documents": [{"text": "one"}]})
        response = await service.chat(question, chat_template_kwargs_json=variables)
        assert response.text == "one: hi"


async def test_special_tokens_around_a_prompt_are_the_callers_choice(
    llama_folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama_folder / name)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    words = "The red circle"
    async with make_preprocess(tmp_path) as service:
        for adds in (True, False):
            ids = oracle(words, add_special_tokens=adds)["input_ids"]
            request = PrepareRequest(text=words, add_special_tokens=adds)
            assert ids_of(await service.prepare(request)) == ids
            chat = Conversation(messages=[turn("user", text(words))])
            request = PrepareRequest(conversation=chat, add_special_tokens=adds)
            assert ids_of(await service.prepare(request)) == ids
        with_both = [oracle(words, add_special_tokens=adds)["input_ids"] for adds in (True, False)]
        assert with_both[0] != with_both[1]
