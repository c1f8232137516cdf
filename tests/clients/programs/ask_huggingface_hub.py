"""Hugging Face's InferenceClient: chats by OpenAI's API, text by TGI's."""

from asked import (
    ASKED,
    ENOUGH,
    PICTURE_TURNS,
    RESULT,
    SCHEMA,
    TOO_HOT,
    TOOL,
    TURNS,
    call,
    error_of,
    found,
    tell,
)
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=ASKED.url, api_key=ASKED.key)
ask = client.chat_completion
few = {"temperature": 0, "max_tokens": ASKED.tokens}
found("chat", "whole", ask(TURNS, **few).choices[0].message.content)
chunks = ask(TURNS, **few, stream=True)
found("chat", "stream", "".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
found("picture", "whole", ask(PICTURE_TURNS, **few).choices[0].message.content)
message = (
    ask(TURNS, temperature=0, max_tokens=ENOUGH, tools=[TOOL], tool_choice="required")
    .choices[0]
    .message
)
[made] = message.tool_calls
found("call", "whole", call(made.function.name, made.function.arguments))
result = {"role": "tool", "tool_call_id": made.id, "content": RESULT}
turns = [*TURNS, dict(message), result]
found("answer", "whole", ask(turns, **few, tools=[TOOL]).choices[0].message.content)
form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
formed = ask(TURNS, temperature=0, max_tokens=ENOUGH, response_format=form)
found("json", "whole", formed.choices[0].message.content)

count = {"max_new_tokens": ASKED.tokens}
found("text", "whole", client.text_generation(ASKED.question, **count))
# As TGI does, a stream shows the token that ended the answer.
stream = client.text_generation(ASKED.question, **count, stream=True)
found("text", "stream", "".join(stream).removesuffix("<|im_end|>"))
grammar = {"type": "json", "value": SCHEMA}
formed = client.text_generation(ASKED.question, max_new_tokens=ENOUGH, grammar=grammar)
found("json", "text", formed)

found("refused", "chat", error_of(ask, TURNS, temperature=TOO_HOT))
found("refused", "stream", error_of(lambda: list(ask(TURNS, temperature=TOO_HOT, stream=True))))
found("refused", "text", error_of(client.text_generation, ASKED.question, temperature=TOO_HOT))
denied = InferenceClient(base_url=ASKED.url, api_key="wrong")
found("denied", "chat", error_of(denied.chat_completion, TURNS))
found("denied", "text", error_of(denied.text_generation, ASKED.question))
other = InferenceClient(base_url=ASKED.base_url, api_key=ASKED.key)
found("chat", "with /v1", other.chat_completion(TURNS, **few).choices[0].message.content)
tell()
