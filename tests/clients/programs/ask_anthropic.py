"""Anthropic's client for Python."""

import base64
import time
from typing import Literal

from anthropic import Anthropic, beta_tool
from asked import (
    ASKED,
    ENOUGH,
    PICTURE,
    RESULT,
    SCHEMA,
    SHAPES,
    TOO_HOT,
    TURNS,
    agent,
    call,
    error_of,
    found,
    tell,
)
from pydantic import BaseModel


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    round: bool


client = Anthropic(base_url=ASKED.url, api_key=ASKED.key, max_retries=0)
greedy = {"model": ASKED.model, "extra_body": {"temperature": 0}}
short = {**greedy, "max_tokens": ASKED.tokens}
create = client.messages.create
found("chat", "whole", create(**short, messages=TURNS).content[0].text)
with client.messages.stream(**short, messages=TURNS) as stream:
    found("chat", "helper", stream.get_final_text())
text = ""
for event in create(**short, messages=TURNS, stream=True):
    if event.type == "content_block_delta":
        text += event.delta.text
found("chat", "stream", text)
source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
blocks = [{"type": "image", "source": source}, {"type": "text", "text": ASKED.question}]
pictures = [{"role": "user", "content": blocks}]
found("picture", "whole", create(**short, messages=pictures).content[0].text)
file = client.beta.files.upload(file=("a.png", base64.b64decode(PICTURE), "image/png"))
blocks[0] = {"type": "image", "source": {"type": "file", "file_id": file.id}}
found("picture", "file", create(**short, messages=pictures).content[0].text)
client.beta.files.delete(file.id)

params = {"model": ASKED.model, "max_tokens": ASKED.tokens, "temperature": 0, "messages": TURNS}
batch = client.messages.batches.create(requests=[{"custom_id": "one", "params": params}])
while batch.processing_status != "ended":
    time.sleep(0.2)
    batch = client.messages.batches.retrieve(batch.id)
[answered] = client.messages.batches.results(batch.id)
found("chat", "batch", answered.result.message.content[0].text)
client.messages.batches.delete(batch.id)

tools = [{"name": "count", "description": "How many there are.", "input_schema": SHAPES}]
calling = {**greedy, "max_tokens": ENOUGH, "tools": tools, "tool_choice": {"type": "any"}}
message = create(**calling, messages=TURNS)
[made] = message.content
found("call", "whole", call(made.name, made.input))
with client.messages.stream(**calling, messages=TURNS) as stream:
    [streamed] = stream.get_final_message().content
found("call", "stream", call(streamed.name, streamed.input))
result = {"type": "tool_result", "tool_use_id": made.id, "content": RESULT}
turns = [
    *TURNS,
    {"role": "assistant", "content": message.content},
    {"role": "user", "content": [result]},
]
found("answer", "whole", create(**short, tools=tools, messages=turns).content[0].text)

calls = []


@beta_tool
def get_weather(city: str) -> str:
    """How it is outside."""
    calls.append({"city": city})
    return RESULT


other = Anthropic(base_url=ASKED.agent_url, api_key=ASKED.key, max_retries=0)
loop = {
    "model": ASKED.agent_model,
    "max_tokens": 50,
    "tools": [get_weather],
    "messages": TURNS,
    "extra_body": {"temperature": 0},
}
runner = other.beta.messages.tool_runner(**loop)
ended = runner.until_done()
found("agent", "runner", agent([*calls], ended.content[0].text))
calls.clear()
for stream in other.beta.messages.tool_runner(**loop, stream=True):
    last = stream.get_final_message()
found("agent", "runner stream", agent([*calls], last.content[0].text))

form = {"format": {"type": "json_schema", "schema": SCHEMA}}
formed = create(**greedy, max_tokens=ENOUGH, messages=TURNS, output_config=form)
found("json", "whole", formed.content[0].text)
parsed = client.messages.parse(**greedy, max_tokens=ENOUGH, messages=TURNS, output_format=Shape)
found("json", "parse", parsed.parsed_output.model_dump_json())

counted = client.messages.count_tokens(model=ASKED.model, messages=TURNS)
found("count", "messages", counted.input_tokens)
found("models", "list", [one.id for one in client.models.list()])
hot = {"model": ASKED.model, "max_tokens": 5, "extra_body": {"temperature": TOO_HOT}}
found("refused", "whole", error_of(create, **hot, messages=TURNS))
found("refused", "stream", error_of(create, **hot, messages=TURNS, stream=True))
found("unknown", "whole", error_of(create, model="another", max_tokens=5, messages=TURNS))
denied = Anthropic(base_url=ASKED.url, api_key="wrong", max_retries=0)
found("denied", "whole", error_of(denied.messages.create, **short, messages=TURNS))
bearer = Anthropic(base_url=ASKED.url, auth_token=ASKED.key, max_retries=0)
found("chat", "bearer", bearer.messages.create(**short, messages=TURNS).content[0].text)
tell()
