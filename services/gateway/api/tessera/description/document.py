"""The description of all routes in OpenAPI's form, made of them and of the Structs of their bodies and replies."""

import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from services.gateway.admission.api_keys import KeyHeader
from services.gateway.api.tessera.description.schemas import Schemas
from services.gateway.http.endpoint import Endpoint, Route
from shared.errors import InvalidRequest

_VERSION = "3.1.0"
_JSON, _FORM = "application/json", "multipart/form-data"
_STARS = re.compile(r"\*+")
_NAMES = re.compile(r"\{(\w+)\}")
# Docstrings of handlers and bodies: the route, which the description has anyway, and a sentence.
_SENTENCE = re.compile(r"(?:GET|POST|DELETE|PUT) /[^:]*: (.+?)(?:\.(?: |$)|$)")
_SAMPLE = InvalidRequest(
    "INVALID_VALUE", "temperature must be between 0 and 2", field="temperature"
)


def describe(endpoints: Sequence[Endpoint], release: str, *, has_keys: bool) -> dict[str, Any]:
    """The document. `has_keys`: callers need one where a route asks for it."""
    routes = [route for endpoint in endpoints for route in endpoint.routes]
    kinds = [kind for r in routes for kind in (r.body, r.form, r.reply) if kind]
    schemas = Schemas(kinds)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        for route in endpoint.routes:
            path, method = template(route.path), route.method.lower()
            operation = _operation(endpoint, route, path, schemas, has_keys)
            methods = paths.setdefault(path, {})
            # The body says which of the two APIs is meant.
            methods[method] = (
                _either(methods[method], operation) if method in methods else operation
            )
    listed = [header for e in endpoints for r in e.routes for header in _key_headers(e, r)]
    headers = {_scheme(header): header for header in listed}
    # The first endpoint of a folder says what its API is.
    tags = {tag(endpoint): _about_api(endpoint) for endpoint in reversed(endpoints)}
    tags = dict(reversed(tags.items()))
    return {
        "openapi": _VERSION,
        "info": {
            "title": "Tessera",
            "version": release,
            "description": "What each field means and how APIs differ is said in docs/api.md.",
        },
        "tags": [{"name": name, "description": text} for name, text in tags.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {name: _security(header) for name, header in headers.items()},
        },
    }


def template(pattern: str) -> str:
    """The path of a route with the names of its parts in braces."""
    name = "model" if "/models/" in pattern else "id"
    return _STARS.sub(f"{{{name}}}", pattern)


def tag(endpoint: Endpoint) -> str:
    """What an API is called: the folder in which its endpoint stands."""
    return type(endpoint).__module__.split(".")[3]


def _about_api(endpoint: Endpoint) -> str:
    return inspect.getdoc(sys.modules[type(endpoint).__module__]) or ""


def _operation(
    endpoint: Endpoint, route: Route, path: str, schemas: Schemas, has_keys: bool
) -> dict[str, Any]:
    name = _NAMES.sub(r"\1", path).strip("/").replace("/", "_").replace(".", "_") or "root"
    operation: dict[str, Any] = {
        "tags": [tag(endpoint)],
        "summary": next(_said(route), f"{route.method} {path}"),
        "operationId": f"{route.method.lower()}_{name}",
        "responses": _responses(endpoint, route, schemas),
    }
    parameters = [_parameter("path", name, "") for name in _NAMES.findall(path)]
    parameters += [_parameter("query", name, text) for name, text in route.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {"schema": schemas.ref(route.body), "example": schemas.example(route.body)}
        operation["requestBody"] = {"required": True, "content": {_JSON: content}}
    elif route.form is not None:
        form = {_FORM: {"schema": schemas.ref(route.form)}}
        operation["requestBody"] = {"required": True, "content": form}
    keys = _key_headers(endpoint, route) if has_keys and route.needs_key else ()
    operation["security"] = [{_scheme(header): []} for header in keys]
    return operation


def _said(route: Route) -> Iterator[str]:
    """What docstrings say beside the route."""
    for told in (route.handler, route.body, route.reply):
        text = " ".join((inspect.getdoc(told) or "").split()) if told is not None else ""
        if found := _SENTENCE.match(text):
            yield found[1][0].upper() + found[1][1:]


def _parameter(place: str, name: str, text: str) -> dict[str, Any]:
    parameter: dict[str, Any] = {"name": name, "in": place, "schema": {"type": "string"}}
    if text:
        parameter["description"] = text
    return {**parameter, "required": True} if place == "path" else parameter


def _responses(endpoint: Endpoint, route: Route, schemas: Schemas) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "Done."}
    if route.reply is not None:
        done["content"] = {_JSON: {"schema": schemas.ref(route.reply)}}
    elif route.generates:
        done["description"] = "The answer: whole, or as a stream where the request asks for one."
    error = endpoint.error(_SAMPLE)
    example = {"schema": {"type": "object"}, "example": json.loads(error.body)}
    return {
        "200": done,
        "default": {"description": "An error, in this API's form.", "content": {_JSON: example}},
    }


def _either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """One operation for two APIs with the same path and method."""
    contents = [each["requestBody"]["content"][_JSON] for each in (one, other)]
    content = {**contents[0], "schema": {"anyOf": [each["schema"] for each in contents]}}
    return {
        **one,
        "tags": one["tags"] + other["tags"],
        "summary": f"{one['summary']} / {other['summary']}",
        "requestBody": {"required": True, "content": {_JSON: content}},
    }


def _key_headers(endpoint: Endpoint, route: Route) -> Sequence[KeyHeader]:
    return (*endpoint.key_headers, *route.key_headers)


def _scheme(header: KeyHeader) -> str:
    return header.scheme.lower() or header.name.lower()


def _security(header: KeyHeader) -> dict[str, str]:
    if header.scheme:
        return {"type": "http", "scheme": header.scheme.lower()}
    return {"type": "apiKey", "in": "header", "name": header.name}
