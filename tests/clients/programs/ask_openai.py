"""OpenAI's client for Python."""

import base64
from typing import Literal

from asked import (
    ASKED,
    ENOUGH,
    PICTURE,
    PICTURE_TURNS,
    RESULT,
    SCHEMA,
    SHAPES,
    TOO_HOT,
    TOOL,
    TURNS,
    call,
    error_of,
    found,
    tell,
)
from openai import OpenAI
from pydantic import BaseModel


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    round: bool


client = OpenAI(base_url=ASKED.base_url, api_key=ASKED.key, max_retries=0)
few = {"model": ASKED.model, "temperature": 0}
short = {**few, "max_tokens": ASKED.tokens}
create = client.chat.completions.create
found("chat", "whole", create(**short, messages=TURNS).choices[0].message.content)
chunks = create(**short, messages=TURNS, stream=True, stream_options={"include_usage": True})
found("chat", "stream", "".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
with client.chat.completions.stream(**short, messages=TURNS) as stream:
    found("chat", "helper", "".join(e.delta for e in stream if e.type == "content.delta"))
found("picture", "whole", create(**short, messages=PICTURE_TURNS).choices[0].message.content)

file = client.files.create(file=("a.png", base64.b64decode(PICTURE)), purpose="vision")
text = {"type": "text", "text": ASKED.question}
shown = [{"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}, text]}]
found("picture", "file", create(**short, messages=shown).choices[0].message.content)

tools = {**few, "tools": [TOOL], "max_tokens": ENOUGH}
message = create(**tools, messages=TURNS, tool_choice="required").choices[0].message
[made] = message.tool_calls
found("call", "whole", call(made.function.name, made.function.arguments))
with client.chat.completions.stream(**tools, messages=TURNS, tool_choice="required") as stream:
    [streamed] = stream.get_final_completion().choices[0].message.tool_calls
found("call", "stream", call(streamed.function.name, streamed.function.arguments))
result = {"role": "tool", "tool_call_id": made.id, "content": RESULT}
turns = [*TURNS, message.model_dump(exclude_unset=True), result]
answered = create(**short, tools=[TOOL], messages=turns)
found("answer", "whole", answered.choices[0].message.content)

form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
formed = create(**few, max_tokens=ENOUGH, messages=TURNS, response_format=form)
found("json", "whole", formed.choices[0].message.content)
parsed = client.chat.completions.parse(
    **few, max_tokens=ENOUGH, messages=TURNS, response_format=Shape
)
found("json", "parse", parsed.choices[0].message.parsed.model_dump_json())

short = {**few, "max_output_tokens": ASKED.tokens}
found("chat", "responses", client.responses.create(**short, input=ASKED.question).output_text)
with client.responses.stream(**short, input=ASKED.question) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
found("chat", "responses stream", "".join(deltas))
items = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": ASKED.picture},
            {"type": "input_text", "text": ASKED.question},
        ],
    }
]
found("picture", "responses", client.responses.create(**short, input=items).output_text)
items[0]["content"][0] = {"type": "input_image", "file_id": file.id}
found("picture", "responses file", client.responses.create(**short, input=items).output_text)
assert client.files.delete(file.id).deleted
tool = {"type": "function", "name": "count", "parameters": SHAPES, "strict": True}
calling = client.responses.create(
    **few, input=ASKED.question, tools=[tool], tool_choice="required", max_output_tokens=ENOUGH
)
[item] = calling.output
found("call", "responses", call(item.name, item.arguments))
result = {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
answered = client.responses.create(
    **short, input=[result], previous_response_id=calling.id, tools=[tool]
)
found("answer", "responses", answered.output_text)
parsed = client.responses.parse(
    **few, input=ASKED.question, text_format=Shape, max_output_tokens=ENOUGH
)
found("json", "responses", parsed.output_parsed.model_dump_json())

found("models", "list", [one.id for one in client.models.list()])
other = OpenAI(base_url=ASKED.vectors_base_url, api_key=ASKED.key, max_retries=0)
vectors = other.embeddings.create(model=ASKED.vectors_model, input=ASKED.question)
found("vector", "base64", vectors.data[0].embedding)

hot = {"model": ASKED.model, "temperature": TOO_HOT}
found("refused", "chat", error_of(create, **hot, messages=TURNS))
found("refused", "stream", error_of(create, **hot, messages=TURNS, stream=True))
found("refused", "responses", error_of(client.responses.create, **hot, input=ASKED.question))
found("unknown", "chat", error_of(create, model="another", messages=TURNS))
denied = OpenAI(base_url=ASKED.base_url, api_key="wrong", max_retries=0)
found("denied", "models", error_of(denied.models.list))
tell()
