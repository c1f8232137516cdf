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
from asked import ASKED, ENOUGH, RESULT, TOO_HOT, agent, call, found, tell
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    round: bool


def made(kind, url, model, key=ASKED.key):
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    return kind(model=model, openai_client=client)


async def whole(one, question=ASKED.question):
    return (await Runner.run(one, question)).final_output


async def streamed(one):
    text = ""
    result = Runner.run_streamed(one, ASKED.question)
    async for event in result.stream_events():
        data = getattr(event, "data", None)
        if getattr(data, "type", "") == "response.output_text.delta":
            text += data.delta
    assert text == result.final_output
    return text


async def error_of(one):
    try:
        await Runner.run(one, ASKED.question)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


PARTS = [
    {"type": "input_image", "image_url": ASKED.picture, "detail": "auto"},
    {"type": "input_text", "text": ASKED.question},
]
SHORT = ModelSettings(temperature=0, max_tokens=ASKED.tokens)
LONG = ModelSettings(temperature=0, max_tokens=ENOUGH)
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
calls = []


@function_tool
def count(shape: Literal["circle", "square"]) -> str:
    """How many there are."""
    calls.append({"shape": shape})
    return RESULT


@function_tool
def get_weather(city: str) -> str:
    """How it is outside."""
    calls.append({"city": city})
    return RESULT


async def ask(name, kind):
    model = made(kind, ASKED.base_url, ASKED.model)
    plain = Agent("plain", model=model, model_settings=SHORT)
    if name == "chat":  # for this client a response that ends by the number of tokens has failed
        found("chat", name, await whole(plain))
        found("chat", f"{name} stream", await streamed(plain))
        found("picture", name, await whole(plain, [{"role": "user", "content": PARTS}]))
    formed = Agent("formed", model=model, model_settings=LONG, output_type=Shape)
    found("json", name, (await whole(formed)).model_dump_json())
    one = Agent(
        "one",
        model=model,
        model_settings=LONG.resolve(ModelSettings(tool_choice="required")),
        tools=[count],
        tool_use_behavior="stop_on_first_tool",
    )
    await whole(one)
    found("call", name, call("count", calls.pop()))
    caller = Agent(
        "caller",
        model=made(kind, ASKED.agent_base_url, ASKED.agent_model),
        model_settings=ModelSettings(temperature=0, max_tokens=50),
        tools=[get_weather],
    )
    for how, run in ((name, whole), (f"{name} stream", streamed)):
        calls.clear()
        text = await run(caller)
        found("agent", how, agent([*calls], text))
    calls.clear()
    hot = Agent("hot", model=model, model_settings=ModelSettings(temperature=TOO_HOT))
    found("refused", name, await error_of(hot))
    denied = Agent("denied", model=made(kind, ASKED.base_url, ASKED.model, "wrong"))
    found("denied", name, await error_of(denied))


async def main():
    for name, kind in KINDS.items():
        await ask(name, kind)


asyncio.run(main())
tell()
