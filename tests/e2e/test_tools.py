"""Tools through the whole system: the model is asked what `apply_chat_template(tools=...)` of transformers asks it, and
calls them.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart, GenerationOptions
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.calling_model import CALLING, make_caller
from tests.support.checkpoints import make_checkpoint
from tests.support.processes.services_in_process import services_in_process

TEMPLATE = (
    "{% if tools %}tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "stop"}},
]
QUESTION: Any = [{"role": "user", "content": "what is the weather?"}]


async def _ids_by_grpc(address: str, **more: Any) -> list[int]:
    """Of the prompt."""
    message = ChatMessage(role="user", content=[ContentPart(text=QUESTION[0]["content"])])
    options = GenerationOptions(max_tokens=1, return_token_ids=True)
    request = ChatRequest(messages=[message], options=options, **more)
    async with open_channel(address) as channel:
        stub: Any = ChatServiceStub(channel)
        events = [event async for event in stub.Chat(request)]
    return [number for event in events for number in event.accepted.prompt_token_ids]


def test_tools_that_are_not_to_be_called_are_part_of_the_prompt(
    tmp_path: Path, redis_url: str
) -> None:
    folder = make_checkpoint(tmp_path / "under-test", "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = {
        shows: words.apply_chat_template(
            QUESTION, tools=TOOLS if shows else None, add_generation_prompt=True, return_dict=False
        )
        for shows in (False, True)
    }
    with (
        services_in_process(folder, redis_url) as system,
        OpenAI(base_url=system.base_url, api_key="none", max_retries=0) as client,
    ):
        for shows, ids in expected.items():
            given: Any = {"tools": TOOLS, "tool_choice": "none"} if shows else {}
            answer: Any = client.chat.completions.create(
                model="under-test",
                messages=QUESTION,
                max_tokens=1,
                extra_body={"return_token_ids": True},
                **given,
            )
            assert answer.prompt_token_ids == ids
            assert not answer.choices[0].message.tool_calls
            by_grpc = {"tools_json": json.dumps(TOOLS), "tool_choice": "none"} if shows else {}
            assert asyncio.run(_ids_by_grpc(system.grpc_address, **by_grpc)) == ids


def test_a_model_calls_a_tool_and_gets_what_it_gave(tmp_path: Path, redis_url: str) -> None:
    folder = make_caller(tmp_path / "under-test")
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    asked: Any = {"model": "under-test", "messages": QUESTION, "tools": TOOLS, "temperature": 0}
    with (
        services_in_process(folder, redis_url) as system,
        OpenAI(base_url=system.base_url, api_key="none", max_retries=0) as client,
    ):
        answer: Any = client.chat.completions.create(**asked, max_tokens=20)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", None)
        assert message.reasoning_content == "Look outside."
        assert answer.usage.completion_tokens_details.reasoning_tokens == 3
        [call] = message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Łódź"}
        # With no room for a thought its end comes at once, and the call behind it all the same.
        at_once: Any = client.chat.completions.create(
            **asked, max_tokens=20, extra_body={"thinking_token_budget": 0}
        )
        assert "reasoning_content" not in at_once.choices[0].message.model_dump()
        assert at_once.usage.completion_tokens_details.reasoning_tokens == 2  # the markers
        assert at_once.choices[0].message.tool_calls[0].function == call.function
        with client.chat.completions.stream(**asked, max_tokens=20) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        [again] = streamed.message.tool_calls or []
        assert again.function.arguments == call.function.arguments

        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turns = [*QUESTION, message.model_dump(exclude_unset=True), result]
        followed: Any = client.chat.completions.create(
            **{**asked, "messages": turns}, max_tokens=1, extra_body={"return_token_ids": True}
        )
    function = {"name": "get_weather", "arguments": {"city": "Łódź"}}
    called = {"type": "function", "function": function, "id": call.id}
    known = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [called]}, result]
    assert followed.prompt_token_ids == words.apply_chat_template(
        known, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )


def test_a_call_that_has_to_be_made_is_made(tmp_path: Path, redis_url: str) -> None:
    """By a model of random weights, which would never make one; it goes on within the grammar as asked."""
    folder = make_checkpoint(
        tmp_path / "under-test", "llama", text={"max_position_embeddings": 1024}
    )
    (folder / "chat_template.jinja").write_text(CALLING.partition("{#")[0])
    parameters: Any = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "boolean"}},
        "required": ["unit", "days"],
    }
    tools: Any = [
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "stop"}},
    ]
    choice: Any = {"type": "function", "function": {"name": "f"}}
    with (
        services_in_process(folder, redis_url) as system,
        OpenAI(base_url=system.base_url, api_key="none", max_retries=0) as client,
    ):
        answer: Any = client.chat.completions.create(
            model="under-test",
            messages=QUESTION,
            tools=tools,
            tool_choice=choice,
            max_tokens=400,  # no call of this form is longer
            seed=1,
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "f"
    found = json.loads(call.function.arguments)
    assert found.keys() == {"unit", "days"} and found["unit"] in "CF"


def test_the_input_of_a_custom_tool_is_held_to_its_grammar(tmp_path: Path, redis_url: str) -> None:
    """By the same model, in chats and responses, whole and streamed."""
    folder = make_checkpoint(
        tmp_path / "under-test", "llama", text={"max_position_embeddings": 1024}
    )
    (folder / "chat_template.jinja").write_text(CALLING.partition("{#")[0])
    lark = 'start: line line\nline: "+" /[a-z"\\\\]{1,8}/ NL\n%import common.LF -> NL\n'
    grammar = {"syntax": "lark", "definition": lark}
    nested = {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}
    flat: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar", **grammar}}
    few: Any = {"model": "under-test", "tool_choice": "required", "parallel_tool_calls": False}
    with (
        services_in_process(folder, redis_url) as system,
        OpenAI(base_url=system.base_url, api_key="none", max_retries=0) as client,
    ):
        asked = {**few, "messages": QUESTION, "tools": [{"type": "custom", "custom": nested}]}
        for seed in range(3):
            answer: Any = client.chat.completions.create(**asked, max_tokens=400, seed=seed)
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls
            assert (call.type, call.custom.name) == ("custom", "patch")
            assert re.fullmatch(r'(\+[a-z"\\]{1,8}\n){2}', call.custom.input)
            chunks: Any = client.chat.completions.create(
                **asked, max_tokens=400, seed=seed, stream=True
            )
            deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
            assert "".join(one.custom["input"] for one in deltas) == call.custom.input
        response: Any = client.responses.create(
            **few, input="Patch it.", tools=[flat], max_output_tokens=400, extra_body={"seed": 1}
        )
        made = response.output[-1]
        assert (made.type, made.name) == ("custom_tool_call", "patch")
        assert re.fullmatch(r'(\+[a-z"\\]{1,8}\n){2}', made.input)
