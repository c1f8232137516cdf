"""Bodies of requests: right ones, in which something is then made wrong."""

import base64
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import values
from tests.support.pictures import animation, png

MODEL = "fuzzed"
_PICTURES = [
    png(1, (56, 56)),
    png(2, (28, 84)),
    animation([png(1, (56, 56)), png(2, (56, 56))], 500),
]
_FIELDS = [
    "model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "bad_words", "bad_token_ids",
    "allowed_token_ids", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "user",
    "priority", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "tools", "tool_choice",
    "response_format", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty",
    "use_beam_search", "early_stopping", "ignore_eos", "min_tokens", "return_token_ids", "service_tier",
    "truncate_prompt_tokens", "mm_processor_kwargs", "cache_salt", "metadata", "tokens", "text", "unknown",
    "inputs", "parameters", "text_input", "sampling_parameters", "input_id", "id", "outputs", "details", "stop_words",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
    "functions", "function_call", "add_special_tokens", "return_token_strs", "documents",
    "options", "images", "format", "think", "keep_alive", "system", "template", "context", "raw",
    "parallel_tool_calls", "include_reasoning", "reasoning_effort",
    "stop_sequences", "thinking", "output_config",
    "encoding_format", "dimensions", "normalize", "use_activation", "prompt_name", "task", "queries", "text_1",
    "text_2", "query", "top_n", "return_documents", "instruction", "truncate",
    "input", "instructions", "previous_response_id", "store", "background", "include", "reasoning", "text",
]  # fmt: skip
POOLED_ROUTES = (
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/api/embed", "/api/embeddings",
)  # fmt: skip
_MEDIA_BYTES = 4096
_LENGTHS = ["max_new_tokens", "max_new_tokens", "max_tokens"]


def body(draw: random.Random, route: str) -> bytes:
    """A body for a route: in turn right, with a field or a place inside made wrong, or with bytes changed."""
    content = _right(draw, route)
    kind = draw.random()
    if kind < 0.1:
        return _bytes(content)
    if kind < 0.15:
        return _bytes(values.any_value(draw))
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if draw.random() < 0.6:
            content[draw.choice(_FIELDS)] = values.any_value(draw)
        else:
            _break_inside(draw, content)
    written = _bytes(content)
    return _damaged(draw, written) if draw.random() < 0.1 else written


def _right(draw: random.Random, route: str) -> dict[str, Any]:
    if route in ("/", "/infer", "/v1/tokenizer") or route.startswith(("/generate", "/v2/")):
        return _of_another_api(draw, route)
    if route in POOLED_ROUTES:
        return _pooled(draw, route)
    of_api = next((make for root, make in _OF_APIS.items() if route.startswith(root)), None)
    if of_api is not None:
        return of_api(draw, route)
    if route.endswith("/detokenize"):
        return {"model": MODEL, "tokens": [draw.randrange(300) for _ in range(8)]}
    if route.endswith("/tokenize") and draw.random() < 0.5:
        return {"model": MODEL, "prompt": "some words", "return_token_strs": draw.random() < 0.5}
    few: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": draw.randint(1, 4),
        "temperature": draw.choice([0, 1]),
    }
    if draw.random() < 0.3:
        few["stream"] = True
    if route.endswith("/completions") and "chat" not in route:
        prompts = ["some words", [5, 6, 7], ["one", "two"], [[5, 6], [7]]]
        return {**few, "prompt": draw.choice(prompts)}
    if route.endswith("/tokenize"):
        few = {"model": MODEL}
    if draw.random() < 0.2:
        few |= {"tools": _tools(draw), "tool_choice": "none"}
    return {**few, "messages": _messages(draw)}


def _of_another_api(draw: random.Random, route: str) -> dict[str, Any]:
    """Bodies of TGI, vLLM, Triton and MindIE."""
    prompt: Any = "some words"
    if draw.random() < 0.4:
        prompt = [{"text": prompt}, {"image": values.url(draw)}, _picture(draw)]
    elif draw.random() < 0.3:
        prompt = f"![]({values.url(draw)}) some words"
    few: dict[str, Any] = {draw.choice(_LENGTHS): draw.randint(1, 4)}
    if draw.random() < 0.5:
        few |= {"details": True, "temperature": 0.5, "stop": ["x"]}
    if route.endswith("/stopInfer"):
        return {"id": "some"}
    if route == "/v1/tokenizer":
        return {"inputs": "some words", "do_decode": draw.random() < 0.5}
    if route.endswith("/infer") and route != "/infer":
        text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["some words"]}
        ids = {"name": "input0", "datatype": "INT64", "shape": [1, 3], "data": [[5, 6, 7]]}
        count = {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [3]}
        outputs = [{"name": "text_output", "parameters": {"binary_data": draw.random() < 0.5}}]
        given = [draw.choice([text, ids]), count]
        return {"id": "some", "inputs": given, "outputs": outputs, "parameters": {"seed": 3}}
    if route.startswith("/v2/"):
        return {"text_input": prompt, "parameters": few, "id": "some"}
    if route == "/generate" and draw.random() < 0.5:
        return {"prompt": prompt, "max_tokens": 3, "stream": draw.random() < 0.5}
    return {"inputs": prompt, "parameters": few}


def _pooled(draw: random.Random, route: str) -> dict[str, Any]:
    """Bodies whose texts become vectors or scores."""
    few: dict[str, Any] = {"model": MODEL}
    if route.startswith("/api/"):
        few |= {"keep_alive": "5m", "options": {"num_ctx": 64, "num_gpu": 1}}
        if route == "/api/embeddings":
            return {**few, "prompt": "some words"}
        return {**few, "input": draw.choice(["some words", ["one", "two"]]), "truncate": True}
    if route.endswith("/rerank"):
        documents = draw.choice([["one", "two"], [{"text": "one"}, "two"]])
        return {**few, "query": "which?", "documents": documents, "top_n": 1}
    if route.endswith("/score"):
        queries, documents = draw.choice([("queries", "documents"), ("text_1", "text_2")])
        asked = draw.choice(["which?", ["which?"], ["a", "b"]])
        return {**few, queries: asked, documents: ["one", "two"]}
    if draw.random() < 0.3:
        return {**few, "messages": _messages(draw)}
    inputs = ["some words", [5, 6, 7], ["one", "two"], [[5, 6], [7]]]
    few |= {"input": draw.choice(inputs), "truncate_prompt_tokens": draw.choice([-1, 4, 64])}
    if route == "/classify":
        return few
    dimensions = draw.choice([None, 2, 8])
    return {**few, "encoding_format": draw.choice(["float", "base64"]), "dimensions": dimensions}


def _of_ollama(draw: random.Random, route: str) -> dict[str, Any]:
    if route == "/api/show":
        return {"model": MODEL}
    options = {"num_predict": draw.randint(1, 4), "temperature": 0.5, "stop": ["x"], "num_gpu": 1}
    few = {"model": MODEL, "options": options, "stream": draw.random() < 0.5, "keep_alive": "5m"}
    pictures = {"images": [base64.b64encode(draw.choice(_PICTURES)).decode()]}
    if route == "/api/generate":
        return {**few, "prompt": "What is this?", **(pictures if draw.random() < 0.4 else {})}
    turn = {"role": "user", "content": "What is this?"}
    return {**few, "messages": [turn | (pictures if draw.random() < 0.4 else {})]}


def _of_anthropic(draw: random.Random, route: str) -> dict[str, Any]:
    text = {"type": "text", "text": "What is this?"}
    picture = base64.b64encode(picture_file(draw)).decode()
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": picture},
    }
    of_url = {"type": "image", "source": {"type": "url", "url": values.url(draw)}}
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "x"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": draw.choice(["sunny", [text, image]]),
    }
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": draw.choice(["Hi", [text], [text, image, of_url]])}
    ]
    if draw.random() < 0.4:
        messages.append({"role": "assistant", "content": [thought, text, call]})
        messages.append({"role": "user", "content": [result, text]})
    if draw.random() < 0.2:
        messages.append({"role": "assistant", "content": "It is"})
    body: dict[str, Any] = {"model": MODEL, "messages": messages}
    if draw.random() < 0.3:
        body["system"] = draw.choice(["Be brief.", [text]])
    if draw.random() < 0.3:
        body["tools"] = [{"name": "weather", "input_schema": {"type": "object"}}]
        body["tool_choice"] = {"type": draw.choice(["none", "auto", "any"])}
    if route.endswith("/count_tokens"):
        return body
    return {
        **body,
        "max_tokens": draw.randint(1, 4),
        "stream": draw.random() < 0.4,
        "stop_sequences": ["x"],
    }


def _of_responses(draw: random.Random, route: str) -> dict[str, Any]:
    text = {"type": "input_text", "text": "What is this?"}
    picture = base64.b64encode(picture_file(draw)).decode()
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    of_url = {"type": "input_image", "image_url": values.url(draw)}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": draw.choice(["Hi", [text], [text, image, of_url]])}
    ]
    if draw.random() < 0.4:
        items += [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": draw.choice(["sunny", [image]]),
            },
        ]
    if draw.random() < 0.1:
        items.append({"type": "item_reference", "id": f"msg_r_{'0' * 8}_{'0' * 32}_0"})
    body: dict[str, Any] = {
        "model": MODEL,
        "input": draw.choice(["What is this?", items, items]),
        "max_output_tokens": draw.randint(1, 4),
        "stream": draw.random() < 0.4,
        "store": draw.random() < 0.8,
    }
    if draw.random() < 0.3:
        body["tools"] = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
        body["tool_choice"] = draw.choice(["none", "auto", "required"])
    if draw.random() < 0.1:
        body["previous_response_id"] = f"resp_r_{'0' * 8}_{'0' * 32}"
    if draw.random() < 0.1:
        body |= {"background": True, "store": True}
    return body


_OF_APIS: Mapping[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "/api/": _of_ollama,
    "/v1/messages": _of_anthropic,
    "/v1/responses": _of_responses,
}


def _messages(draw: random.Random) -> list[dict[str, Any]]:
    content: Any = "What is this?"
    if draw.random() < 0.4:
        content = [{"type": "text", "text": content}, _picture(draw)]
        if draw.random() < 0.2:
            for part in content:
                del part["type"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if draw.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    if draw.random() < 0.2:
        function = {"name": "weather", "arguments": draw.choice(['{"city": "x"}', "{", {}])}
        call = {"id": "call_1", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": "sunny"})
    return messages


def _tools(draw: random.Random) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "What it is like", "parameters": schema}
    return [{"type": "function", "function": function} for _ in range(draw.randint(1, 3))]


def _picture(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {"type": "image_url", "image_url": {"url": values.url(draw)}}
    kind = draw.choice(["image", "image", "video"])
    picture = picture_file(draw)
    return {
        "type": f"{kind}_url",
        f"{kind}_url": {"url": f"data:{kind}/png;base64,{base64.b64encode(picture).decode()}"},
    }


def picture_file(draw: random.Random) -> bytes:
    """A small picture, half of them damaged."""
    picture = draw.choice(_PICTURES)
    return picture if draw.random() < 0.5 else _damaged(draw, picture)


def _break_inside(draw: random.Random, content: dict[str, Any]) -> None:
    """Puts something wrong in a random place of the tree, or takes one away."""
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(place[key], dict | list) and draw.random() < 0.7:
            place = place[key]
            continue
        if isinstance(place, dict) and draw.random() < 0.3:
            del place[key]
        else:
            place[key] = values.any_value(draw)
        return


def _bytes(content: Any) -> bytes:
    """As JSON; what is too deep for the library is written by hand."""
    try:
        return json.dumps(content).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def _damaged(draw: random.Random, written: bytes) -> bytes:
    """Some bytes changed, cut off or repeated."""
    damaged = bytearray(written)
    for _ in range(draw.randint(1, 5)):
        if not damaged:
            break
        at = draw.randrange(len(damaged))
        change = draw.random()
        if change < 0.6:
            damaged[at] = draw.randrange(256)
        elif change < 0.8:
            del damaged[at : at + draw.randint(1, 64)]
        else:
            damaged[at:at] = damaged[at : at + _MEDIA_BYTES]
    return bytes(damaged)
