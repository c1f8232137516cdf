"""What is said of paths at which there is nothing: of those that other servers have, what to call instead."""

from collections.abc import Collection, Mapping

from services.gateway.http.errors import NoRoute

_CHAT = "send the conversation to /v1/chat/completions"
_PROMPT = "send the prompt to /v1/completions"
_TEXT_ALONE = "this server's answers are text alone"
_NO_VECTORS = "this server gives neither vectors nor scores of texts, but text"
_NO_FILES = "send each request by itself"
_NOT_KEPT = "nothing is kept between requests: send the whole conversation to /v1/chat/completions"
_NO_TRAINING = "this server does not train"
_ONE_MODEL = "a server has one model from its start to its end"
_INFO = "/v1/models, /version and /metrics say what is served"
_NO_PAGES = "docs/api.md describes the API"

# By path, with what lies below it. docs/api.md has the same list.
NOT_OFFERED: Mapping[str, str] = {
    "/v1/responses": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/complete": _CHAT,
    "/v1/assistants": _NOT_KEPT,
    "/v1/threads": _NOT_KEPT,
    "/v1/conversations": _NOT_KEPT,
    "/v1/realtime": _CHAT,
    "/v1/embeddings": _NO_VECTORS,
    "/v1/moderations": _NO_VECTORS,
    "/v1/score": _NO_VECTORS,
    "/v1/rerank": _NO_VECTORS,
    "/v2/rerank": _NO_VECTORS,
    "/v2/embed": _NO_VECTORS,
    "/pooling": _NO_VECTORS,
    "/classify": _NO_VECTORS,
    "/score": _NO_VECTORS,
    "/rerank": _NO_VECTORS,
    "/embed": _NO_VECTORS,
    "/v1/audio": _TEXT_ALONE,
    "/v1/images": _TEXT_ALONE,
    "/v1/videos": _TEXT_ALONE,
    "/v1/files": _NO_FILES,
    "/v1/uploads": _NO_FILES,
    "/v1/batches": _NO_FILES,
    "/v1/vector_stores": _NO_FILES,
    "/v1/containers": _NO_FILES,
    "/v1/evals": _NO_TRAINING,
    "/v1/fine_tuning": _NO_TRAINING,
    "/v1/edits": _CHAT,
    "/v1/engines": _INFO,
    "/v1/load_lora_adapter": _ONE_MODEL,
    "/v1/unload_lora_adapter": _ONE_MODEL,
    "/generate": _PROMPT,
    "/generate_stream": _PROMPT,
    "/inference/v1/generate": _PROMPT,
    "/invocations": _CHAT,
    "/chat_tokenize": "send the messages to /tokenize",
    "/info": _INFO,
    "/server_info": _INFO,
    "/get_model_info": _INFO,
    "/get_server_info": _INFO,
    "/sleep": _ONE_MODEL,
    "/wake_up": _ONE_MODEL,
    "/is_sleeping": _ONE_MODEL,
    "/reset_prefix_cache": "use `cache_salt` for prefixes that are not to be found",
    "/openapi.json": _NO_PAGES,
    "/docs": _NO_PAGES,
    "/redoc": _NO_PAGES,
    "/infer": _PROMPT,
    "/infer_token": _PROMPT,
    "/stopInfer": "leave the connection, or DELETE /v1/requests/{id}",
    "/v2": "this server has OpenAI's API, not KServe's",
    "/api": "this server has OpenAI's API, not Ollama's",
}  # fmt: skip
_ROOT = "/v1"


def no_route(path: str, routes: Collection[str]) -> NoRoute:
    """The error for a path at which there is nothing, where there are `routes`."""
    shown = path[:200]
    found = _not_offered(path)
    if found is not None:
        return NoRoute(
            "ROUTE_NOT_OFFERED",
            f"{shown} is not offered: {NOT_OFFERED[found]} (docs/api.md lists the routes)",
        )
    if _ROOT + path in routes:
        return NoRoute(
            "NO_SUCH_ROUTE",
            f"there is nothing at {shown}: it is at {_ROOT}{shown}; the base URL of OpenAI's clients ends with {_ROOT}",
        )
    doubled = path.removeprefix(_ROOT)
    if doubled != path and doubled in routes:
        return NoRoute(
            "NO_SUCH_ROUTE",
            f"there is nothing at {shown}: it is at {doubled}; the base URL of clients ends with {_ROOT} once",
        )
    return NoRoute(
        "NO_SUCH_ROUTE",
        f"there is nothing at {shown}: this server has {', '.join(sorted(routes))} (docs/api.md)",
    )


def _not_offered(path: str) -> str | None:
    """The entry of `NOT_OFFERED` that a path belongs to."""
    at = path
    while at:
        if at in NOT_OFFERED:
            return at
        at = at.rpartition("/")[0]
    return None
