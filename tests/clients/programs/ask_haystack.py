"""Haystack's generators and embedders for OpenAI's API."""

import asked as given
from asked import (
    ASKED,
    CITY,
    ENOUGH,
    PICTURE,
    RESULT,
    SCHEMA,
    TOO_HOT,
    agent,
    call,
    error_of,
    found,
    tell,
)
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import Tool
from haystack.utils import Secret


def made(kind, url=ASKED.base_url, model=ASKED.model, key=ASKED.key, streaming=None, **options):
    return kind(
        api_key=Secret.from_token(key),
        model=model,
        api_base_url=url,
        max_retries=0,
        streaming_callback=streaming,
        generation_kwargs={"temperature": 0, **options},
    )


KINDS = {
    "chat": (OpenAIChatGenerator, "max_tokens"),
    "responses": (OpenAIResponsesChatGenerator, "max_output_tokens"),
}
question = ChatMessage.from_user(ASKED.question)
picture = ImageContent(PICTURE, mime_type="image/png")
seen = ChatMessage.from_user(content_parts=[picture, ASKED.question])
form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
for name, (kind, limit) in KINDS.items():
    short, longer = {limit: ASKED.tokens}, {limit: ENOUGH}
    found("chat", name, made(kind, **short).run([question])["replies"][0].text)
    pieces = []
    made(kind, streaming=pieces.append, **short).run([question])
    found("chat", f"{name} stream", "".join(piece.content for piece in pieces))
    found("picture", name, made(kind, **short).run([seen])["replies"][0].text)
    count = Tool("count", "How many there are.", given.SHAPES, lambda shape: RESULT)
    caller = made(kind, tool_choice="required", **longer)
    message = caller.run([question], tools=[count])["replies"][0]
    [one] = message.tool_calls
    found("call", name, call(one.tool_name, one.arguments))
    turns = [question, message, ChatMessage.from_tool(RESULT, one)]
    answered = made(kind, **short).run(turns, tools=[count])["replies"][0]
    found("answer", name, answered.text)
    calls = []

    def get_weather(city):
        calls.append({"city": city})  # noqa: B023
        return RESULT

    weather = Tool("get_weather", "How it is outside.", CITY, get_weather)
    loop = Agent(
        chat_generator=made(kind, ASKED.agent_base_url, ASKED.agent_model, **{limit: 50}),
        tools=[weather],
    )
    found("agent", name, agent(calls, loop.run(messages=[question])["last_message"].text))
    hot = made(kind, temperature=TOO_HOT)
    found("refused", name, error_of(hot.run, [question]))
    found("denied", name, error_of(made(kind, key="wrong").run, [question]))
formed = made(OpenAIChatGenerator, response_format=form, max_tokens=ENOUGH).run([question])
found("json", "chat", formed["replies"][0].text)
form = {"format": {"type": "json_schema", "name": "shape", "schema": SCHEMA, "strict": True}}
formed = made(OpenAIResponsesChatGenerator, text=form, max_output_tokens=ENOUGH).run([question])
found("json", "responses", formed["replies"][0].text)
vectors = OpenAITextEmbedder(
    api_key=Secret.from_token(ASKED.key),
    model=ASKED.vectors_model,
    api_base_url=ASKED.vectors_base_url,
)
found("vector", "text", vectors.run(ASKED.question)["embedding"])
tell()
