"""instructor: typed answers by calls and by forms, over OpenAI's and Anthropic's clients."""

from typing import Literal

import anthropic
import instructor
import openai
from asked import ASKED, ENOUGH, PICTURE_TURNS, TOO_HOT, TURNS, error_of, found, tell
from pydantic import BaseModel


class Shape(BaseModel):
    """A shape."""

    colour: Literal["red", "blue"]
    round: bool


few = {"model": ASKED.model, "temperature": 0, "max_tokens": ENOUGH, "max_retries": 1}
given = {**few, "messages": TURNS, "response_model": Shape}
modes = instructor.Mode
for mode in (modes.TOOLS, modes.TOOLS_STRICT, modes.JSON_SCHEMA, modes.RESPONSES_TOOLS):
    plain = openai.OpenAI(base_url=ASKED.base_url, api_key=ASKED.key, max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    found("json", mode.name, client.create(**given).model_dump_json())
client = instructor.from_openai(plain, mode=modes.TOOLS)
*_, last = client.create_partial(**given)
found("json", "partial", last.model_dump_json())
seen = client.create(**{**given, "messages": PICTURE_TURNS})
found("json", "picture", seen.model_dump_json())
found("refused", "TOOLS", error_of(client.create, **{**given, "temperature": TOO_HOT}))
denied = openai.OpenAI(base_url=ASKED.base_url, api_key="wrong", max_retries=0)
found("denied", "TOOLS", error_of(instructor.from_openai(denied).create, **given))
del given["temperature"]
plain = anthropic.Anthropic(base_url=ASKED.url, api_key=ASKED.key, max_retries=0)
for mode in (modes.ANTHROPIC_TOOLS,):
    client = instructor.from_anthropic(plain, mode=mode)
    made = client.create(**given, extra_body={"temperature": 0})
    found("json", mode.name, made.model_dump_json())
tell()
