"""OpenAI's Responses and Anthropic's Messages with their clients and the whole system: answers are those of chats."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from services.launcher.redis.embedded_redis import EmbeddedRedis
from tests.support.calling_model import make_caller
from tests.support.pictures import data_url, png
from tests.support.processes.services_in_process import services_in_process
from tests.support.processes.system import System

if TYPE_CHECKING:  # it takes seconds, of which workers that do not run these tests have no use
    from anthropic import Anthropic

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("system_of_two")]
TEXT = "What is in the picture?"
QUESTION: Any = [{"role": "user", "content": "what is the weather?"}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
CITY = {"city": "Łódź"}
# What a model that calls says before it does.
THOUGHT = "Look outside."


def openai_client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


def anthropic_client(url: str) -> "Anthropic":
    from anthropic import Anthropic

    http = httpx2.Client(verify=False)
    return Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120, http_client=http)


@pytest.fixture(scope="module")
def system(system_of_two: System) -> System:
    system_of_two.wait_ready()
    return system_of_two


def test_pictures_get_the_answers_of_chats(system: System) -> None:
    few: Any = {"model": "tiny", "temperature": 0}
    url = data_url(png(3))
    parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    items: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": TEXT}]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    with openai_client(system.base_url) as openai, anthropic_client(system.url) as anthropic:
        chat: Any = openai.chat.completions.create(
            **few, messages=[{"role": "user", "content": parts}], max_tokens=12
        )
        wanted = chat.choices[0].message.content
        asked: Any = {**few, "input": [{"role": "user", "content": items}], "max_output_tokens": 12}
        response = openai.responses.create(**asked)
        with openai.responses.stream(**asked) as stream:
            assert stream.until_done() is stream
        last: Any = [*openai.responses.create(**asked, stream=True)][-1].response
        turns: Any = [{"role": "user", "content": blocks}]
        said: Any = {"model": "tiny", "messages": turns, "max_tokens": 12}
        message: Any = anthropic.messages.create(**said, extra_body={"temperature": 0})
        with anthropic.messages.stream(**said, extra_body={"temperature": 0}) as events:
            streamed = events.get_final_text()
        counted = anthropic.messages.count_tokens(model="tiny", messages=turns)
    assert wanted and response.output_text == last.output_text == wanted
    assert message.content[0].text == streamed == wanted
    is_cut = chat.choices[0].finish_reason == "length"
    assert response.status == last.status == ("incomplete" if is_cut else "completed")
    assert message.stop_reason == ("max_tokens" if is_cut else "end_turn")
    usage = response.usage
    assert usage is not None and usage.input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens == message.usage.output_tokens
    assert counted.input_tokens == chat.usage.prompt_tokens
    used = message.usage
    assert used.input_tokens + used.cache_read_input_tokens == chat.usage.prompt_tokens


class Caller:
    """A system of which the model calls a tool, and its tokenizer."""

    def __init__(self, base_url: str, folder: Path) -> None:
        self.base_url = base_url
        self._words = PreTrainedTokenizerFast.from_pretrained(folder)

    def prompt_tokens(self, turns: Any, tools: Any) -> int:
        """As transformers counts them."""
        shown = self._words.apply_chat_template(
            turns, tools=tools, add_generation_prompt=True, return_dict=False
        )
        return len(shown)


@pytest.fixture(scope="module")
def caller(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis
) -> Iterator[Caller]:
    folder = make_caller(tmp_path_factory.mktemp("model") / "under-test")
    with services_in_process(folder, redis_server.url) as system:
        yield Caller(system.base_url, folder)


def conversation(call_id: str) -> Any:
    """What chat templates know of it, once the tool has answered."""
    function = {"name": "get_weather", "arguments": CITY}
    called = {"type": "function", "function": function, "id": call_id}
    given = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
    return [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [called]}, given]


def function(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_responses_call_a_tool_and_get_what_it_gave(caller: Caller) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}]
    asked: Any = {"model": "under-test", "tools": tools, "temperature": 0}
    with openai_client(caller.base_url) as client:
        first: Any = client.responses.create(**asked, input=QUESTION, max_output_tokens=20)
        thought, call = first.output
        assert (first.status, thought.content[0].text, call.name) == (
            "completed",
            THOUGHT,
            "get_weather",
        )
        assert json.loads(call.arguments) == CITY
        with client.responses.stream(**asked, input=QUESTION, max_output_tokens=20) as stream:
            final: Any = stream.get_final_response()
        assert final.output[1].arguments == call.arguments
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        kept = client.responses.create(
            **asked, input=[result], previous_response_id=first.id, max_output_tokens=1
        )
        sent = client.responses.create(
            **asked,
            input=[*QUESTION, thought.to_dict(), call.to_dict(), result],
            max_output_tokens=1,
        )
        waiting = client.responses.create(
            **asked, input=QUESTION, background=True, max_output_tokens=20
        )
        with client.responses.stream(response_id=waiting.id) as stream:
            later: Any = stream.get_final_response()
        assert later.output[1].arguments == call.arguments
        assert client.responses.retrieve(waiting.id).status == "completed"
    shown = [function("get_weather", PARAMETERS)]
    wanted = caller.prompt_tokens(conversation(call.call_id), shown)
    assert kept.usage is not None and sent.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens == wanted


def test_messages_call_a_tool_and_get_what_it_gave(caller: Caller) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
    greedy = {"temperature": 0}
    asked: Any = {"model": "under-test", "tools": tools}
    with anthropic_client(caller.base_url.removesuffix("/v1")) as client:
        first: Any = client.messages.create(
            **asked, messages=QUESTION, max_tokens=20, extra_body=greedy
        )
        thought, call = first.content
        assert (first.stop_reason, thought.thinking, call.name) == (
            "tool_use",
            THOUGHT,
            "get_weather",
        )
        assert call.input == CITY
        with client.messages.stream(
            **asked, messages=QUESTION, max_tokens=20, extra_body=greedy
        ) as stream:
            final: Any = stream.get_final_message()
        assert final.content[1].input == CITY and final.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns: Any = [
            *QUESTION,
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        counted = client.messages.count_tokens(**asked, messages=turns)
    shown = [function("get_weather", PARAMETERS)]
    assert counted.input_tokens == caller.prompt_tokens(conversation(call.id), shown)
