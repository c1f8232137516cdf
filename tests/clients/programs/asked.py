"""What a program for a client is given, what it asks, and how it tells what came of it.

Programs of this folder run where only their client is installed: they import nothing but it and this file.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

# Of a server that sees pictures and makes what it is held to: url, base_url (url + /v1), grpc_address, model. Of one
# that calls WEATHER by itself and ends with a text: agent_url, agent_base_url, agent_model. Of one of embeddings:
# vectors_url, vectors_base_url, vectors_model. For all: key, question, picture (a PNG as a data: URL), and tokens (how
# many a short answer has).
ASKED = SimpleNamespace(**json.loads(sys.argv[1]))
# The bytes of the picture in base64.
PICTURE = ASKED.picture.partition(",")[2]
# Enough for a call and for JSON.
ENOUGH = 400
TURNS = [{"role": "user", "content": ASKED.question}]
PARTS = [
    {"type": "image_url", "image_url": {"url": ASKED.picture}},
    {"type": "text", "text": ASKED.question},
]
PICTURE_TURNS = [{"role": "user", "content": PARTS}]
SHAPES = {
    "type": "object",
    "properties": {"shape": {"type": "string", "enum": ["circle", "square"]}},
    "required": ["shape"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "count", "description": "How many there are.", "parameters": SHAPES},
}
# What the tool gives.
RESULT = "3"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "round": {"type": "boolean"},
    },
    "required": ["colour", "round"],
    "additionalProperties": False,
}
TOO_HOT = 9  # a temperature

_found = {}


def found(kind, how, value):
    """Keeps what one way to ask has given; `kind` says what it is (see `test_clients.py`)."""
    _found.setdefault(kind, {})[how] = value


def call(name, arguments):
    """A call as `found` takes it; arguments as a text of JSON or as an object."""
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": name, "arguments": parsed}


def agent(calls, text):
    """What a loop of calls and results has come to, as `found` takes it; calls as arguments."""
    return {"calls": calls, "text": text}


def error_of(ask, *args, **kwargs):
    """The class and text of the error that a call raises; coroutines are run."""
    try:
        made = ask(*args, **kwargs)
        if asyncio.iscoroutine(made):
            asyncio.run(made)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tell():
    """Prints all that was found, as the last line."""
    print(json.dumps(_found))
