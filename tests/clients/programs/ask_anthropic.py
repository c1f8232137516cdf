"""Anthropic's client for Python."""

from typing import Literal

from anthropic import Anthropic
from asked import (
    ASKED,
    ENOUGH,
    PICTURE,
    RESULT,
    SCHEMA,
    SHAPES,
    TOO_HOT,
    TURNS,
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
