"""langchain for Python: its models for OpenAI's, Anthropic's and Ollama's APIs."""

from typing import Literal

from asked import (
    ASKED,
    ENOUGH,
    PARTS,
    RESULT,
    SCHEMA,
    TOO_HOT,
    TOOL,
    call,
    error_of,
    found,
    tell,
)
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Shape(BaseModel):
    """A shape."""

    colour: Literal["red", "blue"]
    round: bool


def openai(tokens, **more):
    given = {"api_key": ASKED.key, "temperature": 0, "max_retries": 0, **more}
    return ChatOpenAI(base_url=ASKED.base_url, model=ASKED.model, max_tokens=tokens, **given)


def responses(tokens, **more):
    return openai(tokens, use_responses_api=True, **more)


def anthropic(tokens, **more):
    given = {"api_key": ASKED.key, "max_retries": 0, "temperature": 0, **more}
    return ChatAnthropic(base_url=ASKED.url, model=ASKED.model, max_tokens=tokens, **given)


def ollama(tokens, temperature=0, api_key=None):
    headers = {"Authorization": f"Bearer {api_key or ASKED.key}"}
    return ChatOllama(
        base_url=ASKED.url,
        model=ASKED.model,
        num_predict=tokens,
        temperature=temperature,
        client_kwargs={"headers": headers},
    )


QUESTION = HumanMessage(ASKED.question)
MODELS = {"openai": openai, "responses": responses, "anthropic": anthropic, "ollama": ollama}
for name, model in MODELS.items():
    short, longer = model(ASKED.tokens), model(ENOUGH)
    found("chat", name, short.invoke([QUESTION]).text)
    found("chat", f"{name} stream", "".join(chunk.text for chunk in short.stream([QUESTION])))
    # Ollama's gets a line end before the question.
    found("sees" if name == "ollama" else "picture", name, short.invoke([HumanMessage(PARTS)]).text)
    found("refused", name, error_of(model(5, temperature=TOO_HOT).invoke, [QUESTION]))
    found("denied", name, error_of(model(5, api_key="wrong").invoke, [QUESTION]))
    formed = longer.with_structured_output(Shape, method="json_schema").invoke([QUESTION])
    found("json", name, formed.model_dump_json())
    if name == "ollama":
        continue
    choice = "any" if name == "anthropic" else "required"
    tools = longer.bind_tools([TOOL], tool_choice=choice)
    message = tools.invoke([QUESTION])
    [made] = message.tool_calls
    found("call", name, call(made["name"], made["args"]))
    whole = None
    for chunk in tools.stream([QUESTION]):
        whole = chunk if whole is None else whole + chunk
    [streamed] = whole.tool_calls
    found("call", f"{name} stream", call(streamed["name"], streamed["args"]))
    turns = [QUESTION, message, ToolMessage(RESULT, tool_call_id=made["id"])]
    found("answer", name, short.bind_tools([TOOL]).invoke(turns).text)
    formed = longer.with_structured_output(Shape, method="function_calling").invoke([QUESTION])
    found("json", f"{name} function", formed.model_dump_json())
formed = openai(ENOUGH).with_structured_output({"title": "shape", **SCHEMA}).invoke([QUESTION])
found("json", "openai schema", formed)

vectors = OpenAIEmbeddings(
    base_url=ASKED.vectors_base_url,
    api_key=ASKED.key,
    model=ASKED.vectors_model,
    check_embedding_ctx_length=False,
)
found("vector", "openai", vectors.embed_query(ASKED.question))
headers = {"Authorization": f"Bearer {ASKED.key}"}
vectors = OllamaEmbeddings(
    base_url=ASKED.vectors_url, model=ASKED.vectors_model, client_kwargs={"headers": headers}
)
found("vector", "ollama", vectors.embed_query(ASKED.question))
tell()
