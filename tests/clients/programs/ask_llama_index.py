"""LlamaIndex's OpenAILike, for chats and embeddings."""

import asyncio
import base64
from typing import Literal

from asked import (
    ASKED,
    ENOUGH,
    PICTURE,
    RESULT,
    agent,
    call,
    error_of,
    found,
    tell,
)
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Shape(BaseModel):
    """A shape."""

    colour: Literal["red", "blue"]
    round: bool


def made(tokens, url=ASKED.base_url, model=ASKED.model, **more):
    return OpenAILike(
        model=model,
        api_base=url,
        max_tokens=tokens,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_retries=0,
        **{"api_key": ASKED.key, "temperature": 0, **more},
    )


turns = [ChatMessage(role="user", content=ASKED.question)]
short, longer = made(ASKED.tokens), made(ENOUGH)
found("chat", "whole", short.chat(turns).message.content)
found("chat", "stream", "".join(part.delta or "" for part in short.stream_chat(turns)))
blocks = [ImageBlock(image=base64.b64decode(PICTURE)), TextBlock(text=ASKED.question)]
seen = short.chat([ChatMessage(role="user", blocks=blocks)])
found("picture", "whole", seen.message.content)
formed = longer.as_structured_llm(Shape).chat(turns)
found("json", "structured", formed.raw.model_dump_json())


def count(shape: Literal["circle", "square"]) -> str:
    """How many there are."""
    return RESULT


asked = longer.chat_with_tools(
    [FunctionTool.from_defaults(count)], chat_history=turns, tool_required=True
)
[one] = longer.get_tool_calls_from_response(asked)
found("call", "whole", call(one.tool_name, one.tool_kwargs))
calls = []


def get_weather(city: str) -> str:
    """How it is outside."""
    calls.append({"city": city})
    return RESULT


async def run():
    caller = FunctionAgent(
        tools=[get_weather], llm=made(50, ASKED.agent_base_url, ASKED.agent_model)
    )
    return str(await caller.run(ASKED.question))


found("agent", "workflow", agent(calls, asyncio.run(run())))
vectors = OpenAILikeEmbedding(
    model_name=ASKED.vectors_model, api_base=ASKED.vectors_base_url, api_key=ASKED.key
)
found("vector", "whole", vectors.get_query_embedding(ASKED.question))
found("refused", "whole", error_of(made(10**9).chat, turns))
found("denied", "whole", error_of(made(5, api_key="wrong").chat, turns))
tell()
