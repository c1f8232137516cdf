"""Vectors and scores as JSON, piece by piece."""

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from services.gateway.api.pooling import PooledPrompt
from services.gateway.model.pooled_model import Floats
from shared.environment import unix_time

FLOAT, BASE64 = "float", "base64"


def listed(
    prefix: str, request_id: str, model: str, found: Sequence[PooledPrompt], data: Iterator[str]
) -> Iterator[str]:
    """{"id", "object": "list", "created", "model", "data", "usage"}, whose data come one by one."""
    yield '{"id":' + json.dumps(prefix + request_id)
    yield f',"object":"list","created":{int(unix_time())},"model":{json.dumps(model)},"data":['
    for index, one in enumerate(data):
        yield f"{',' if index else ''}{one}"
    yield f'],"usage":{json.dumps(usage(found))}}}'


def usage(found: Sequence[PooledPrompt]) -> dict[str, int]:
    """Tokens of the prompts, which are all that there are."""
    tokens = sum(prompt.tokens for prompt in found)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def item(kind: str, index: int, **fields: Any) -> str:
    """One entry of `data`."""
    return msgspec.json.encode({"object": kind, "index": index, **fields}).decode()


def written(vector: Floats, encoding: str) -> str | list[float]:
    """A vector as numbers, or as base64 of little-endian float32."""
    if encoding == BASE64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
