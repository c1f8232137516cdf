"""pydantic-ai: agents over OpenAI's chats and responses, and Anthropic's messages."""

import base64
from typing import Literal

from asked import ASKED, ENOUGH, PICTURE, RESULT, TOO_HOT, agent, error_of, found, tell
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    round: bool


def models(key, agent_server=False):
    url, model = (ASKED.agent_url, ASKED.agent_model) if agent_server else (ASKED.url, ASKED.model)
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    anthropic = AnthropicProvider(base_url=url, api_key=key)
    return {
        "openai": OpenAIChatModel(model, provider=openai),
        "responses": OpenAIResponsesModel(model, provider=openai),
        "anthropic": AnthropicModel(model, provider=anthropic),
    }


SHORT = {"max_tokens": ASKED.tokens, "temperature": 0}
LONG = {"max_tokens": ENOUGH, "temperature": 0}
DENIED = models("wrong")
for name, model in models(ASKED.key).items():
    plain = Agent(model, model_settings=SHORT)
    found("chat", name, plain.run_sync(ASKED.question).output)
    with plain.run_stream_sync(ASKED.question) as stream:
        found("chat", f"{name} stream", "".join(stream.stream_text(delta=True)))
    picture = BinaryContent(base64.b64decode(PICTURE), media_type="image/png")
    found("picture", name, plain.run_sync([picture, ASKED.question]).output)
    # It knows of no models of Anthropic's API but Anthropic's own that are held to forms.
    for form in (ToolOutput,) if name == "anthropic" else (NativeOutput, ToolOutput):
        formed = Agent(model, model_settings=LONG, output_type=form(Shape))
        how = f"{name} {form.__name__}"
        found("json", how, formed.run_sync(ASKED.question).output.model_dump_json())
    calls = []
    caller = Agent(models(ASKED.key, agent_server=True)[name])

    @caller.tool_plain
    def get_weather(city: str) -> str:
        """How it is outside."""
        calls.append({"city": city})  # noqa: B023
        return RESULT

    found("agent", name, agent(calls, caller.run_sync(ASKED.question).output))
    hot = Agent(model, model_settings={"temperature": TOO_HOT, "max_tokens": 5})
    found("refused", name, error_of(hot.run_sync, ASKED.question))
    denied = Agent(DENIED[name], model_settings=SHORT)
    found("denied", name, error_of(denied.run_sync, ASKED.question))
tell()
