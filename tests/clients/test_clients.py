"""What each client gives of the same questions is what a plain request gives: texts, pictures, calls, JSON, vectors.
Its errors say what was wrong.
"""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from services.launcher.redis.embedded_redis import EmbeddedRedis
from tests.clients.environments import node_program, python_program
from tests.support.calling_model import ANSWER, make_caller
from tests.support.checkpoints import make_checkpoint
from tests.support.pictures import data_url, png
from tests.support.processes.services_in_process import Addresses, services_in_process

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

KEY = "a-key-of-a-client"
QUESTION = "What is in the picture?"
PICTURE = data_url(png(3))
TOKENS = 16  # LiteLLM asks for no fewer
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "round": {"type": "boolean"}},
    "required": ["colour", "round"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"shape": {"enum": ["circle", "square"]}},
            "required": ["shape"],
            "additionalProperties": False,
        },
    },
}
# Pictures, tools by their names, calls and results.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools, by <tool_call>:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# In each kind of what a program finds, what a value must be; see `Expected`. All programs give "refused" and "denied".
ALL = "chat picture call answer json"
PYTHON: Mapping[str, tuple[list[str], str]] = {
    "openai": (["openai>=3,<4"], f"{ALL} models vector unknown"),
    "anthropic": (["anthropic>=2,<3"], f"{ALL} agent count models unknown"),
    "litellm": (["litellm>=1.100,<2"], f"{ALL} vector"),
    "langchain": (
        ["langchain-openai>=1.7,<2", "langchain-anthropic>=1.7,<2", "langchain-ollama>=1.1,<2"],
        f"{ALL} sees vector",
    ),
    "langgraph": (
        [
            "langchain>=1.5,<2",
            "langchain-openai>=1.7,<2",
            "langchain-anthropic>=1.7,<2",
            "langchain-ollama>=1.1,<2",
        ],
        "agent",
    ),
    "pydantic_ai": (["pydantic-ai-slim[openai,anthropic]>=2.60,<3"], "chat picture agent json"),
    "huggingface_hub": (["huggingface_hub>=2,<3"], f"{ALL} text"),
    "llm": (["llm>=0.36,<1"], "chat picture_behind agent json"),
    "ollama": (["ollama>=0.6,<1"], "chat picture agent json count models vector unknown"),
    "tritonclient": (
        ["tritonclient[http,grpc]>=2.60,<3"],
        "text text_with_picture models unknown",
    ),
    "text_generation": (["text-generation>=0.7,<1"], "chat text text_with_picture json"),
    "instructor": (["instructor>=1.17,<2", "anthropic>=1,<3"], "json"),
    "openai_agents": (["openai-agents>=0.24,<1"], "chat picture call agent json"),
    "llama_index": (
        ["llama-index-llms-openai-like>=0.8,<1", "llama-index-embeddings-openai-like>=0.4,<1"],
        "chat picture call agent json vector",
    ),
    "haystack": (["haystack-ai>=3,<4"], f"{ALL} agent vector"),
    "curl": ([], "chat picture"),
}
NODE: Mapping[str, tuple[list[str], str]] = {
    "openai_node": (["openai@^7"], f"{ALL} models vector unknown"),
    "vercel": (
        ["ai@^7", "@ai-sdk/openai-compatible@^3", "@ai-sdk/openai@^4", "@ai-sdk/anthropic@^4"],
        f"{ALL} agent vector",
    ),
    "langchain_js": (["@langchain/openai@^1", "@langchain/core@^1"], f"{ALL} vector"),
    "ollama_js": (["ollama@^0.6"], "chat picture agent json models vector unknown"),
}

# What an error says: that of a number which is too large, of a model that is not there, of a wrong key.
ERRORS = {"refused": "must be between", "unknown": "'another'", "denied": "API key"}


@dataclass
class Expected:
    """What a plain request gives, by kind."""

    given: dict[str, Any]  # what programs are given
    texts: dict[str, str]
    prompt_tokens: int
    vector: list[float]

    def check(self, kind: str, how: str, value: Any) -> None:
        """Fails unless a value is what it should be."""
        where = f"{kind}, {how}: {value!r}"
        match kind:
            case "call":
                assert value == self.given["call"], where
            case "agent":
                assert value == {"calls": [{"city": "Łódź"}], "text": ANSWER}, where
            case "json":
                jsonschema.validate(json.loads(value) if isinstance(value, str) else value, SCHEMA)
            case "count":
                assert value == self.prompt_tokens, where
            case "models":
                assert [name.removesuffix(":latest") for name in value] == ["tiny"], where
            case "sees":  # a client that changes what is said
                assert value and value not in self.texts.values(), where
            case "vector":
                assert value == pytest.approx(self.vector, abs=1e-6), how
            case _ if kind in ERRORS:
                assert ERRORS[kind] in value and "object Object" not in value, where
            case _:
                assert value == self.texts[kind], where


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    """Three servers that need a key, each with a Redis of its own."""
    folder = tmp_path_factory.mktemp("models")
    tiny = _make_tiny(folder / "tiny")
    caller = make_caller(folder / "caller")
    vectors = make_checkpoint(folder / "vectors", "qwen3")
    with (
        _serving(tiny) as seeing,
        _serving(caller) as calling,
        _serving(vectors, task="embed") as embedding,
    ):
        roles = {"": seeing, "agent_": calling, "vectors_": embedding}
        addresses = {f"{role}base_url": found.base_url for role, found in roles.items()}
        addresses |= {f"{role}url": found.base_url[:-3] for role, found in roles.items()}
        names = {"model": "tiny", "agent_model": "caller", "vectors_model": "vectors"}
        given: dict[str, Any] = {
            **addresses,
            **names,
            "grpc_address": seeing.grpc_address,
            "key": KEY,
        }
        given |= {"question": QUESTION, "picture": PICTURE, "tokens": TOKENS}
        yield _expected(given)


def _make_tiny(folder: Path) -> Path:
    """A checkpoint of random weights that makes one call where it has to. What it says is printable, for some clients
    strip what is not.
    """
    text = {"max_position_embeddings": 2048}
    made = make_checkpoint(folder, "qwen2_vl", seed=7, text=text, template=TEMPLATE)
    words = PreTrainedTokenizerFast.from_pretrained(made)
    path = made / "generation_config.json"
    settings = json.loads(path.read_text())
    texts = {number: words.decode([number]) for number in range(len(words))}
    silent = [
        number
        for number, text in texts.items()
        if words.convert_ids_to_tokens(number) != "<|im_end|>"
        and (
            number in words.all_special_ids
            or "\ufffd" in text
            or not text.replace("\n", "").isprintable()
        )
    ]
    path.write_text(json.dumps({**settings, "suppress_tokens": silent}))
    return made


@contextlib.contextmanager
def _serving(model: Path, **settings: Any) -> Iterator[Addresses]:
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        path = Path(folder)
        with (
            EmbeddedRedis(path, path / "r.sock", persistent=False) as redis,
            services_in_process(model, redis.url, api_key=KEY, **settings) as system,
        ):
            yield system


def _expected(given: dict[str, Any]) -> Expected:
    """By requests as they are written in the documents."""
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as http:

        def post(url: str, body: Any) -> Any:
            reply = http.post(url, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        def chat(turns: Any, **more: Any) -> Any:
            body = {"messages": turns, "max_tokens": TOKENS, "temperature": 0, **more}
            return post(f"{given['base_url']}/chat/completions", body)

        image = {"type": "image_url", "image_url": {"url": PICTURE}}
        turns: list[Any] = [{"role": "user", "content": QUESTION}]
        text = {"type": "text", "text": QUESTION}
        seen, behind = (
            [{"role": "user", "content": parts}] for parts in ([image, text], [text, image])
        )
        plain = chat(turns)
        called = chat(turns, tools=[TOOL], tool_choice="required", max_tokens=400)
        message = called["choices"][0]["message"]
        [call] = message["tool_calls"]
        turns += [message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        texts = {
            "chat": plain["choices"][0]["message"]["content"],
            "picture": chat(seen)["choices"][0]["message"]["content"],
            "picture_behind": chat(behind)["choices"][0]["message"]["content"],
            "answer": chat(turns, tools=[TOOL])["choices"][0]["message"]["content"],
        }
        for kind, prompt in (
            ("text", QUESTION),
            ("text_with_picture", [{"image": PICTURE}, {"text": QUESTION}]),
        ):
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            [text] = post(f"{given['url']}/generate", body)["text"]
            texts[kind] = text.removeprefix(QUESTION)
        assert all(texts.values()) and len(set(texts.values())) == len(texts), texts
        found = post(f"{given['vectors_base_url']}/embeddings", {"input": QUESTION})
    arguments = json.loads(call["function"]["arguments"])
    given["call"] = {"name": call["function"]["name"], "arguments": arguments}
    count = plain["usage"]["prompt_tokens"]
    return Expected(given, texts, count, found["data"][0]["embedding"])


def _ask(command: list[str], kinds: str, expected: Expected) -> None:
    """Runs a program, and checks all that it found: what it has to find, in one way at least."""
    done = subprocess.run(
        [*command, json.dumps(expected.given)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {*kinds.split(), "refused", "denied"}
    for kind, ways in found.items():
        for how, value in ways.items():
            expected.check(kind, how, value)


@pytest.mark.parametrize("name", PYTHON)
def test_a_client_of_python(expected: Expected, name: str) -> None:
    requirements, kinds = PYTHON[name]
    _ask(python_program(name, requirements), kinds, expected)


@pytest.mark.parametrize("name", NODE)
def test_a_client_of_node(expected: Expected, name: str) -> None:
    requirements, kinds = NODE[name]
    _ask(node_program(name, requirements), kinds, expected)
