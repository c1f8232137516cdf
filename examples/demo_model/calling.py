"""The one tool that the model calls, `count(shape)`, and others that it leaves alone."""

from __future__ import annotations

import json
import random
from typing import Any

from examples.demo_model.pictures.scenes import SHAPES, Scene
from examples.demo_model.questions import Questions, Turn

CALL_OPEN, CALL_CLOSE = "<tool_call>\n", "\n</tool_call>"

# Name and parameters of tools that have nothing to do with a picture.
_OTHERS = (
    ("get_weather", "city, unit"),
    ("get_weather", "location"),
    ("search", "query"),
    ("web_search", "query, limit"),
    ("calculate", "expression"),
    ("get_time", "timezone"),
    ("send_email", "to, subject, body"),
    ("translate", "text, language"),
    ("get_stock_price", "symbol"),
    ("play_music", "title"),
    ("read_file", "path"),
    ("book_flight", "origin, destination, date"),
    ("now", ""),
    ("set_alarm", "time"),
)
# What a tool may answer with, its number in place of {n}.
_RESULTS = (
    "{n}",
    "{n}",
    '{"count": {n}}',
    '{"count": {n}}',
    '{"result": {n}}',
    '{"number": {n}}',
    '{"shape": "{shape}", "count": {n}}',
    '{"{shape}": {n}}',
    "count: {n}",
)


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as a request names it; parameters: the schema of each."""
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


COUNT = tool("count", {"shape": {"type": "string", "enum": list(SHAPES)}})


def pick_tools(rng: random.Random, with_count: bool) -> list[dict[str, Any]]:
    """One to four tools in any order, `count` among them or not."""
    others = rng.choices((0, 1, 2, 3), (0.4, 0.3, 0.2, 0.1))[0]
    tools = [
        tool(name, {p: {"type": "string"} for p in parameters.split(", ") if p})
        for name, parameters in rng.sample(_OTHERS, max(others, 1 - with_count))
    ]
    tools += [COUNT] * with_count
    rng.shuffle(tools)
    return tools


def tools_line(tools: list[dict[str, Any]]) -> str:
    """The system turn that names them, as the chat template writes it."""
    functions = [tool["function"] for tool in tools]
    return "tools: " + ", ".join(
        f"{f['name']}({', '.join(f['parameters']['properties'])})" for f in functions
    )


def call_text(shape: str) -> str:
    """A call of `count` as the model writes it: in the form of Hermes."""
    return f"{CALL_OPEN}{json.dumps(_call(shape))}{CALL_CLOSE}"


def tool_turn(result: str) -> str:
    """A tool's message as the chat template writes it."""
    return f"<tool_response>\n{result}\n</tool_response>"


def call_message(shape: str) -> dict[str, Any]:
    """The same call as a message of an earlier turn."""
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": _call(shape)}]}


def with_calls(turns: list[Turn], scene: Scene, rng: random.Random) -> list[Turn]:
    """The same conversation where `count` may be called: it is, for the number of one shape."""
    told: list[Turn] = []
    for turn in turns:
        told += [turn] if turn.counted is None else _call_turns(turn, turn.counted, scene, rng)
    return told


def _call_turns(turn: Turn, shape: str, scene: Scene, rng: random.Random) -> list[Turn]:
    """The call for the question of a turn, and the answer that the tool's result leads to.

    The result is drawn at random, so that the model learns to say what the tool says, not what it sees.
    """
    n = rng.choices((rng.randrange(6), rng.randrange(10), rng.randrange(100)), (0.6, 0.25, 0.15))[0]
    result = rng.choice(_RESULTS).replace("{n}", str(n)).replace("{shape}", shape)
    language = "zh" if any(c >= "\u4e00" for c in turn.answer) else "en"
    asker = Questions(scene, language, rng)
    answer = asker.sentence(asker.count_body(n, shape, None))
    return [
        Turn(turn.question, call_text(shape), "tool call", counted=shape),
        Turn(result, answer, "tool answer", role="tool"),
    ]


def _call(shape: str) -> dict[str, Any]:
    return {"name": "count", "arguments": {"shape": shape}}
