"""LiteLLM: its providers for servers of OpenAI's, Anthropic's and Ollama's APIs."""

import litellm
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

PROVIDERS = {
    "openai": {"model": f"openai/{ASKED.model}", "api_base": ASKED.base_url},
    "hosted_vllm": {"model": f"hosted_vllm/{ASKED.model}", "api_base": ASKED.base_url},
    "anthropic": {"model": f"anthropic/{ASKED.model}", "api_base": ASKED.url},
}
form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
for name, where in PROVIDERS.items():
    where["api_key"] = ASKED.key
    few = {**where, "temperature": 0, "num_retries": 0, "max_tokens": ASKED.tokens}
    ask = litellm.completion
    found("chat", name, ask(**few, messages=TURNS).choices[0].message.content)
    chunks = list(ask(**few, messages=TURNS, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    found("chat", f"{name} stream", text)
    found("picture", name, ask(**few, messages=PICTURE_TURNS).choices[0].message.content)
    longer = {**few, "max_tokens": ENOUGH}
    calling = {**longer, "tools": [TOOL], "tool_choice": "required"}
    message = ask(**calling, messages=TURNS).choices[0].message
    [made] = message.tool_calls
    found("call", name, call(made.function.name, made.function.arguments))
    whole = litellm.stream_chunk_builder(list(ask(**calling, messages=TURNS, stream=True)))
    [streamed] = whole.choices[0].message.tool_calls
    found("call", f"{name} stream", call(streamed.function.name, streamed.function.arguments))
    result = {"role": "tool", "tool_call_id": made.id, "content": RESULT}
    turns = [*TURNS, message.model_dump(), result]
    answered = ask(**few, tools=[TOOL], messages=turns)
    found("answer", name, answered.choices[0].message.content)
    formed = ask(**longer, messages=TURNS, response_format=form)
    found("json", name, formed.choices[0].message.content)
    hot = {**few, "temperature": TOO_HOT}
    found("refused", name, error_of(ask, **hot, messages=TURNS))
    found("denied", name, error_of(ask, **{**few, "api_key": "wrong"}, messages=TURNS))

ollama = {"model": f"ollama_chat/{ASKED.model}", "api_base": ASKED.url, "api_key": ASKED.key}
few = {**ollama, "temperature": 0, "max_tokens": ASKED.tokens}
found("chat", "ollama", litellm.completion(**few, messages=TURNS).choices[0].message.content)
chunks = litellm.completion(**few, messages=TURNS, stream=True)
found("chat", "ollama stream", "".join(c.choices[0].delta.content or "" for c in chunks))
found(
    "picture",
    "ollama",
    litellm.completion(**few, messages=PICTURE_TURNS).choices[0].message.content,
)
found(
    "refused",
    "ollama",
    error_of(litellm.completion, **{**few, "temperature": TOO_HOT}, messages=TURNS),
)

where = PROVIDERS["openai"]
response = litellm.responses(
    **where, input=ASKED.question, temperature=0, max_output_tokens=ASKED.tokens
)
found("chat", "responses", response.output_text)
vectors = litellm.embedding(
    model=f"openai/{ASKED.vectors_model}",
    input=[ASKED.question],
    api_base=ASKED.vectors_base_url,
    api_key=ASKED.key,
    encoding_format="float",
)
found("vector", "openai", vectors.data[0]["embedding"])
tell()
