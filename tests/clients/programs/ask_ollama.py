"""Ollama's client for Python."""

import base64

from asked import (
    ASKED,
    ENOUGH,
    PICTURE,
    RESULT,
    SCHEMA,
    TOO_HOT,
    TURNS,
    WEATHER,
    agent,
    error_of,
    found,
    tell,
)
from ollama import Client

HEADERS = {"Authorization": f"Bearer {ASKED.key}"}
client = Client(ASKED.url, headers=HEADERS)
short = {"temperature": 0, "num_predict": ASKED.tokens}
longer = {**short, "num_predict": ENOUGH}
model = ASKED.model
found("chat", "chat", client.chat(model, TURNS, options=short).message.content)
parts = client.chat(model, TURNS, options=short, stream=True)
found("chat", "chat stream", "".join(part.message.content or "" for part in parts))
found("chat", "generate", client.generate(model, ASKED.question, options=short).response)
parts = client.generate(model, ASKED.question, options=short, stream=True)
found("chat", "generate stream", "".join(part.response or "" for part in parts))
turn = {**TURNS[0], "images": [base64.b64decode(PICTURE)]}
found("picture", "chat", client.chat(model, [turn], options=short).message.content)
seen = client.generate(model, ASKED.question, images=[PICTURE], options=short)
found("picture", "generate", seen.response)
formed = client.chat(model, TURNS, options=longer, format=SCHEMA)
found("json", "chat", formed.message.content)
found("models", "list", [one.model for one in client.list().models])
found("models", "ps", [one.model for one in client.ps().models])
found("count", "chat", client.chat(model, TURNS, options=short).prompt_eval_count)
calling = Client(ASKED.agent_url, headers=HEADERS)
turns, tools = [*TURNS], {"tools": [WEATHER], "options": {"temperature": 0}}
message = calling.chat(ASKED.agent_model, turns, **tools).message
turns += [message, {"role": "tool", "tool_name": "get_weather", "content": RESULT}]
told = calling.chat(ASKED.agent_model, turns, **tools).message
made = [call.function.arguments for call in message.tool_calls]
found("agent", "whole", agent(made, told.content))
parts = [*calling.chat(ASKED.agent_model, TURNS, **tools, stream=True)]
made = [call.function.arguments for part in parts for call in part.message.tool_calls or ()]
parts = calling.chat(ASKED.agent_model, turns, **tools, stream=True)
found("agent", "stream", agent(made, "".join(part.message.content or "" for part in parts)))
vectors = Client(ASKED.vectors_url, headers=HEADERS)
found("vector", "embed", vectors.embed(ASKED.vectors_model, ASKED.question).embeddings[0])
hot = {"temperature": TOO_HOT}
found("refused", "chat", error_of(client.chat, model, TURNS, options=hot))
found(
    "refused", "stream", error_of(lambda: list(client.chat(model, TURNS, options=hot, stream=True)))
)
found("unknown", "chat", error_of(client.chat, "another", TURNS))
denied = Client(ASKED.url, headers={"Authorization": "Bearer wrong"})
found("denied", "chat", error_of(denied.chat, model, TURNS))
tell()
