"""Bodies of TGI, vLLM, Triton, MindIE and Ollama."""

import base64
import random
from typing import Any

from tests.fuzz import forms, values
from tests.fuzz.damage import as_json
from tests.fuzz.right.pictures import PICTURES, picture_part
from tests.fuzz.values import MODEL

_TENSORS = [
    ("temperature", "FP32"), ("temperature", "FP64"), ("seed", "UINT64"), ("top_k", "INT32"), ("stop", "BYTES"),
    ("image", "BYTES"), ("ignore_eos", "BOOL"), ("input_ids", "INT64"), ("x", "FP16"),
]  # fmt: skip
_LENGTHS = ["max_new_tokens", "max_new_tokens", "max_tokens"]


def body(draw: random.Random, route: str) -> dict[str, Any]:
    """For a route of TGI, vLLM, Triton or MindIE."""
    prompt: Any = "some words"
    if draw.random() < 0.4:
        prompt = [{"text": prompt}, {"image": values.url(draw)}, picture_part(draw)]
    elif draw.random() < 0.3:
        prompt = f"![]({values.url(draw)}) some words"
    few: dict[str, Any] = {draw.choice(_LENGTHS): draw.randint(1, 4)}
    if draw.random() < 0.5:
        few |= {"details": True, "temperature": 0.5, "stop": ["x"]}
    if route.startswith("/generate") and draw.random() < 0.3:
        kind = draw.choice(["json", "regex"])
        few["grammar"] = {"type": kind, "value": forms.MAKERS[kind](draw)}
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


def of_ollama(draw: random.Random, route: str) -> dict[str, Any]:
    """For a route of Ollama that is not for vectors."""
    if route == "/api/show":
        return {"model": MODEL}
    options = {"num_predict": draw.randint(1, 4), "temperature": 0.5, "stop": ["x"], "num_gpu": 1}
    few = {"model": MODEL, "options": options, "stream": draw.random() < 0.5, "keep_alive": "5m"}
    if draw.random() < 0.2:
        few["format"] = draw.choice(["json", forms.schema(draw)])
    pictures = {"images": [base64.b64encode(draw.choice(PICTURES)).decode()]}
    if route == "/api/generate":
        return {**few, "prompt": "What is this?", **(pictures if draw.random() < 0.4 else {})}
    turn = {"role": "user", "content": "What is this?"}
    return {**few, "messages": [turn | (pictures if draw.random() < 0.4 else {})]}


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
    written = as_json({"inputs": inputs, "parameters": {"max_tokens": 2}})
    return written + behind, draw.choice([len(written)] * 8 + [len(written) - 1, 0, 10**9])
