"""Bodies of requests: right ones, in which something is then made wrong."""

import base64
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import forms, uploads, values
from tests.fuzz.fields import fields_of
from tests.support.pictures import animation, png

MODEL = "fuzzed"
_PICTURES = [
    png(1, (56, 56)),
    png(2, (28, 84)),
    animation([png(1, (56, 56)), png(2, (56, 56))], 500),
]
POOLED_ROUTES = (
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/api/embed", "/api/embeddings",
)  # fmt: skip
_MEDIA_BYTES = 4096
_TENSORS = [
    ("temperature", "FP32"), ("temperature", "FP64"), ("seed", "UINT64"), ("top_k", "INT32"), ("stop", "BYTES"),
    ("image", "BYTES"), ("ignore_eos", "BOOL"), ("input_ids", "INT64"), ("x", "FP16"),
]  # fmt: skip
_FORMS: Mapping[str, Callable[[random.Random], Any]] = {
    "json": forms.schema,
    "regex": forms.expression,
    "grammar": forms.grammar,
    "structural_tag": forms.tag,
}
_LENGTHS = ["max_new_tokens", "max_new_tokens", "max_tokens"]


def body(draw: random.Random, route: str) -> bytes:
    """A body for a route: in turn right, with a field or a place inside made wrong, or with bytes changed."""
    if route == "/v1/files":
        return uploads.form(draw, _lines(draw))
    content = _right(draw, route)
    kind = draw.random()
    if kind < 0.1:
        return _bytes(content)
    if kind < 0.15:
        return _bytes(values.any_value(draw))
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if draw.random() < 0.6:
            _object_in(draw, content)[draw.choice(fields_of(route))] = _value(draw)
        else:
            _break_inside(draw, content)
    written = _bytes(content)
    return _damaged(draw, written) if draw.random() < 0.1 else written


def with_bytes(draw: random.Random) -> tuple[bytes, int]:
    """A body of KServe with tensors as bytes behind its JSON, and the length of the JSON, which may be wrong."""
    inputs, behind = [], b""
    for name, kind in [("text_input", "BYTES"), *draw.sample(_TENSORS, draw.randint(0, 3))]:
        data = draw.choice([b"\x02\0\0\0ab", draw.randbytes(draw.choice([0, 1, 2, 4, 8, 9]))])
        size = draw.choice([len(data), len(data), draw.randint(0, 12)])
        shape = draw.choice([[1], [1], [1, 1], [0], [2]])
        about = {"name": name, "datatype": kind, "shape": shape}
        inputs.append({**about, "parameters": {"binary_data_size": size}})
        behind += data
    written = _bytes({"inputs": inputs, "parameters": {"max_tokens": 2}})
    return written + behind, draw.choice([len(written)] * 8 + [len(written) - 1, 0, 10**9])


def _right(draw: random.Random, route: str) -> dict[str, Any]:
    of_api = next((make for root, make in _OF_APIS.items() if route.startswith(root)), None)
    if of_api is not None:
        return of_api(draw, route)
    if route in ("/", "/infer", "/v1/tokenizer") or route.startswith(("/generate", "/v2/")):
        return _of_another_api(draw, route)
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
        return {**few, **_prompt(draw)}
    if route.endswith("/tokenize"):
        few = {"model": MODEL}
    if draw.random() < 0.3:
        few |= {"tools": _tools(draw), "tool_choice": draw.choice(["none", "auto", "required"])}
    elif draw.random() < 0.3:
        few |= _form(draw)
    return {**few, "max_window_size": draw.choice([None, 1, 40, 4096]), "messages": _messages(draw)}


def _prompt(draw: random.Random) -> dict[str, Any]:
    """The prompt of a completion, or several."""
    if draw.random() < 0.2:
        data = {"image": [values.url(draw), values.url(draw)]}
        marked = draw.choice(["words", "<|image_pad|> <|image_pad|>"])
        return {"prompt": marked, "multi_modal_data": data}
    return {"prompt": draw.choice(["some words", [5, 6, 7], ["one", "two"], [[5, 6], [7]]])}


def _form(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(["json", "regex", "grammar", "structural_tag"])
    made = _FORMS[kind](draw)
    if draw.random() < 0.5:
        return {"structured_outputs": {kind: made}}
    if kind == "structural_tag":
        return {"response_format": made}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": made}}}


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
    if route.startswith("/generate") and draw.random() < 0.3:
        kind = draw.choice(["json", "regex"])
        few["grammar"] = {"type": kind, "value": _FORMS[kind](draw)}
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
    if draw.random() < 0.2:
        few["format"] = draw.choice(["json", forms.schema(draw)])
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
        body["tools"] = [{"name": "weather", "input_schema": forms.schema(draw)}]
        body["tool_choice"] = {"type": draw.choice(["none", "auto", "any"])}
    elif draw.random() < 0.2:
        body["output_config"] = {"format": {"type": "json_schema", "schema": forms.schema(draw)}}
    if draw.random() < 0.2:
        body["thinking"] = {"type": draw.choice(["adaptive", "disabled"])}
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
            {
                "type": "function_call",
                "call_id": "c",
                "name": "weather",
                "arguments": draw.choice(["{}", forms.json_text(draw)]),
            },
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
        body["tools"] = [{"type": "function", "name": "weather", "parameters": forms.schema(draw)}]
        body["tool_choice"] = draw.choice(["none", "auto", "required"])
    elif draw.random() < 0.2:
        body["text"] = {
            "format": {"type": "json_schema", "name": "x", "schema": forms.schema(draw)}
        }
    if draw.random() < 0.1:
        body["previous_response_id"] = f"resp_r_{'0' * 8}_{'0' * 32}"
    if draw.random() < 0.1:
        body |= {"background": True, "store": True}
    return body


def _of_batches(draw: random.Random, route: str) -> dict[str, Any]:
    return {
        "input_file_id": "file-" + draw.choice("0a") * 32,
        "endpoint": draw.choice(["/v1/chat/completions", "/v1/responses"]),
        "completion_window": draw.choice(["24h", "1s"]),
        "metadata": {"of": "fuzz"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }


def _lines(draw: random.Random) -> bytes:
    """A batch's file: some lines, in each of which something may be wrong."""
    return b"\n".join(line(draw, str(number)) for number in range(draw.randint(0, 5)))


def line(draw: random.Random, name: str) -> bytes:
    """A line for chat under this name, with a strange body; it may be no line."""
    route = "/v1/chat/completions"
    asked = body(draw, route).replace(b"\n", b" ")
    head = json.dumps({"custom_id": name, "method": "POST", "url": route}).encode()
    written = head[:-1] + b', "body": ' + asked + b"}"
    return _damaged(draw, written).replace(b"\n", b" ") if draw.random() < 0.2 else written


def _of_adapters(draw: random.Random, route: str) -> dict[str, Any]:
    """What names an adapter; where it lies there is none."""
    return {
        "lora_name": draw.choice(["sql", MODEL, "a" * 300, "\x00"]),
        "lora_path": draw.choice(["sql", "../../etc", "/proc/self/fd/0", "\x00", "a/" * 3000]),
        "load_inplace": draw.choice([True, False, None]),
    }


_OF_APIS: Mapping[str, Callable[[random.Random, str], dict[str, Any]]] = {
    **dict.fromkeys(POOLED_ROUTES, _pooled),
    "/api/": _of_ollama,
    "/v1/batches": _of_batches,
    "/v1/load_lora_adapter": _of_adapters,
    "/v1/unload_lora_adapter": _of_adapters,
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
        function = {"name": "weather", "arguments": _arguments(draw)}
        call = {"id": "call_1", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": "sunny"})
    return messages


def _arguments(draw: random.Random) -> Any:
    return draw.choice(['{"city": "x"}', "{", {}, forms.json_text(draw)])


def _tools(draw: random.Random) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"city": forms.schema(draw)}}
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


def _object_in(draw: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    """The body itself, or an object within it."""
    found, place = content, content
    while draw.random() < 0.6:
        inner: Any = list(place.values() if isinstance(place, dict) else place)
        inner = [one for one in inner if isinstance(one, dict | list) and one]
        if not inner:
            break
        place = draw.choice(inner)
        found = place if isinstance(place, dict) else found
    return found


def _value(draw: random.Random) -> Any:
    """What may be wrong for a field, or is what a field of another route takes."""
    kind = draw.random()
    if kind < 0.1:
        return draw.choice([*_FORMS.values()])(draw)
    if kind < 0.15:
        return forms.json_text(draw)
    return values.any_value(draw)


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
            place[key] = _value(draw)
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
