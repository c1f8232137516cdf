"""Bodies whose texts become vectors or scores."""

import random
from typing import Any

from tests.fuzz.right.chats import conversation
from tests.fuzz.values import MODEL

ROUTES = (
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/api/embed", "/api/embeddings",
)  # fmt: skip


def body(draw: random.Random, route: str) -> dict[str, Any]:
    """For one of `ROUTES`."""
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
        return {**few, "messages": conversation(draw)}
    inputs = ["some words", [5, 6, 7], ["one", "two"], [[5, 6], [7]]]
    few |= {"input": draw.choice(inputs), "truncate_prompt_tokens": draw.choice([-1, 4, 64])}
    if route == "/classify":
        return few
    dimensions = draw.choice([None, 2, 8])
    return {**few, "encoding_format": draw.choice(["float", "base64"]), "dimensions": dimensions}
