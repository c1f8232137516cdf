"""OpenAI's agents, over chats and over responses."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import ASKED, ENOUGH, RESULT, TOO_HOT, agent, call, error_of, found, tell
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    round: bool


def made(kind, url, model, key=ASKED.key):
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    return kind(model=model, openai_client=client)


async def streamed(one):
    text = ""
    result = Runner.run_streamed(one, ASKED.question)
    async for event in result.stream_events():
        data = getattr(event, "data", None)
        if getattr(data, "type", "") == "response.output_text.delta":
            text += data.delta
    assert text == result.final_output
    return text


PARTS = [
    {"type": "input_image", "image_url": ASKED.picture, "detail": "auto"},
    {"type": "input_text", "text": ASKED.question},
]
SHORT = ModelSettings(temperature=0, max_tokens=ASKED.tokens)
LONG = ModelSettings(temperature=0, max_tokens=ENOUGH)
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
for name, kind in KINDS.items():
    model = made(kind, ASKED.base_url, ASKED.model)
    plain = Agent("plain", model=model, model_settings=SHORT)
    found("chat", name, Runner.run_sync(plain, ASKED.question).final_output)
    found("chat", f"{name} stream", asyncio.run(streamed(plain)))
    pictures = [{"role": "user", "content": PARTS}]
    found("picture", name, Runner.run_sync(plain, pictures).final_output)
    formed = Agent("formed", model=model, model_settings=LONG, output_type=Shape)
    found("json", name, Runner.run_sync(formed, ASKED.question).final_output.model_dump_json())
    calls = []

    @function_tool
    def count(shape: Literal["circle", "square"]) -> str:
        """How many there are."""
        calls.append({"shape": shape})  # noqa: B023
        return RESULT

    @function_tool
    def get_weather(city: str) -> str:
        """How it is outside."""
        calls.append({"city": city})  # noqa: B023
        return RESULT

    one = Agent(
        "one",
        model=model,
        model_settings=ModelSettings(temperature=0, max_tokens=ENOUGH, tool_choice="required"),
        tools=[count],
        tool_use_behavior="stop_on_first_tool",
    )
    Runner.run_sync(one, ASKED.question)
    found("call", name, call("count", calls.pop()))
    caller = Agent(
        "caller",
        model=made(kind, ASKED.agent_base_url, ASKED.agent_model),
        model_settings=SHORT.resolve(ModelSettings(max_tokens=50)),
        tools=[get_weather],
    )
    text = Runner.run_sync(caller, ASKED.question).final_output
    found("agent", name, agent([*calls], text))
    calls.clear()
    text = asyncio.run(streamed(caller))
    found("agent", f"{name} stream", agent([*calls], text))
    hot = Agent("hot", model=model, model_settings=ModelSettings(temperature=TOO_HOT))
    found("refused", name, error_of(Runner.run_sync, hot, ASKED.question))
    denied = made(kind, ASKED.base_url, ASKED.model, "wrong")
    found("denied", name, error_of(Runner.run_sync, Agent("denied", model=denied), ASKED.question))
tell()
