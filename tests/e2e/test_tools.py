"""Tools through the whole system: the model is asked what `apply_chat_template(tools=...)` of transformers asks it."""

import asyncio
import json
from pathlib import Path
from typing import Any

from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart, GenerationOptions
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
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
