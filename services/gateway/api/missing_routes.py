"""What is said of paths at which there is nothing: of those that other servers have, what to call instead."""

import re
from collections.abc import Collection, Mapping, Sequence

from services.gateway.errors import NoRoute

# What there is in the place of routes that other servers have. docs/api.md has the same paths.
_INSTEAD: Mapping[str, Sequence[str]] = {
    "send the conversation to /v1/chat/completions": (
        "/v1/complete", "/v1/edits", "/v1/realtime", "/invocations",
    ),
    "a conversation goes on by `previous_response_id` of /v1/responses": (
        "/v1/conversations", "/v1/assistants", "/v1/threads",
    ),
    "send the prompt to /v1/completions, or a conversation to /v1/chat/completions": (
        "/inference/v1/generate", "/infer_token",
    ),
    "send the messages to /tokenize": ("/chat_tokenize",),
    "send the texts to /v1/embeddings": ("/v2/embed", "/embed"),
    "send the texts to /classify, where a classifier is served": ("/v1/moderations",),
    "this server serves no model that hears or speaks yet": ("/v1/audio",),
    "this server's answers are text alone": ("/v1/images", "/v1/videos"),
    "a file is sent whole to /v1/files": ("/v1/uploads",),
    "this server searches no files: send what the model shall read": (
        "/v1/vector_stores", "/v1/containers",
    ),
    "this server neither trains nor evaluates": ("/v1/fine_tuning", "/v1/evals"),
    "a server has one model from its start to its end": ("/sleep", "/wake_up", "/is_sleeping"),
    "/v1/models, /version and /metrics say what is served": (
        "/v1/engines", "/server_info", "/get_model_info", "/get_server_info",
    ),
    "a `cache_salt` of its own keeps a request from what was computed before": (
        "/reset_prefix_cache",
    ),
    "close the connection, or send DELETE /v1/requests/{id}": ("/stopInfer",),
    "/docs shows this server's API, and /openapi.json has it in a form for machines": ("/redoc",),
    "a server has one model from its start to its end, which /api/tags names": (
        "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs",
    ),
}  # fmt: skip
# By path, with what lies below it.
NOT_OFFERED: Mapping[str, str] = {
    path: instead for instead, paths in _INSTEAD.items() for path in paths
}
_ROOT = "/v1"
_STARS = re.compile(r"\*+")  # in a route: what names something


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
    # A model's only version has the routes of the model.
    named = (route for route in routes if "/versions/" not in route)
    listed = ", ".join(sorted(_STARS.sub("{id}", route) for route in named))
    return NoRoute(
        "NO_SUCH_ROUTE", f"there is nothing at {shown} (docs/api.md): this server has {listed}"
    )


def _not_offered(path: str) -> str | None:
    """The entry of `NOT_OFFERED` that a path belongs to."""
    at = path
    while at:
        if at in NOT_OFFERED:
            return at
        at = at.rpartition("/")[0]
    return None
