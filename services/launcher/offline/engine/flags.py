"""Keyword arguments as flags of `tessera serve`."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.launcher.settings import ServeSettings
from shared.errors import InvalidRequest
from shared.lora.modules import parse_modules
from shared.settings import DEMO_MODEL

# What an engine of one's own decides itself: it is reached by nobody else, and answers are the model's text as it is.
_OWN = frozenset(
    {
        "allow_unauthenticated", "allowed_hosts", "api_key", "api_key_file", "cors_allow_origins", "gateways",
        "grpc_port", "host", "log_format", "model", "port", "reasoning_parser", "redis_password_file", "redis_url",
        "shutdown_timeout", "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_keyfile", "state_dir",
        "tenant_weights", "tool_call_parser",
    }
)  # fmt: skip
_ENABLE = "enable_lora"
_FIXED = {
    "host": "127.0.0.1",
    "redis_url": "",
    "log_format": "text",
    "reasoning_parser": "none",
    "tool_call_parser": "none",
    "shutdown_timeout": "1",
}
_DEFAULTS: Mapping[str, Any] = {
    "log_level": "warning",
    # The process is its user's own: whatever its user may read.
    "allowed_local_media_path": "/",
    # How much waits is bounded by the caller.
    "max_waiting_requests": 1 << 20,
    "max_waiting_tokens": 1 << 40,
}
# Variables that would set what is fixed, or switch on what only other clients need.
OWN_VARIABLES = tuple(
    f"TESSERA_{service}{name.upper()}" for name in sorted(_OWN) for service in ("", "GATEWAY_")
)


def engine_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of `tessera serve` that arguments mean: `enable_lora`, vLLM's, lets adapters be loaded from any folder
    unless `allowed_adapter_dir` says from which. Raises TypeError, ValueError for contradictions."""
    flags = dict(given)
    enabled = flags.pop(_ENABLE, None)
    if enabled is not None and not isinstance(enabled, bool):
        raise TypeError(f"{_ENABLE} must be True or False, not {enabled!r}")
    if enabled is False and (flags.get("lora_modules") or flags.get("allowed_adapter_dir")):
        raise ValueError(f"{_ENABLE}=False contradicts lora_modules and allowed_adapter_dir")
    if enabled and flags.get("allowed_adapter_dir") is None:
        flags["allowed_adapter_dir"] = "/"
    return flags


def lora_modules(flags: Mapping[str, Any]) -> dict[str, Path]:
    """Folders of adapters by name, of the flag of this name. Raises ValueError."""
    try:
        return parse_modules(_plain("lora_modules", flags.get("lora_modules") or ""))
    except InvalidRequest as error:
        raise ValueError(error.message) from None


def serve_arguments(model: str | Path | None, flags: Mapping[str, Any]) -> list[str]:
    """The arguments of `tessera serve`, but for ports and folders. Raises TypeError for a flag that is none, ValueError
    for a value out of range.
    """
    given = {name: _plain(name, value) for name, value in {**_DEFAULTS, **flags}.items()}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name in _OWN:
            raise TypeError(f"{name} cannot be given: the engine sets it itself")
        if name not in ServeSettings.model_fields:
            near = difflib.get_close_matches(name, ServeSettings.model_fields, 1)
            hint = f"; is {near[0]} meant?" if near else ""
            raise TypeError(
                f"there is no argument {name}{hint} (`tessera serve --help` lists them)"
            )
    try:
        ServeSettings(**given)
    except ValidationError as error:
        faults = [
            f"{fault['loc'][0]}: {fault['msg']} (got {fault['input']!r})"
            for fault in error.errors()
        ]
        raise ValueError("; ".join(faults)) from None
    folder = DEMO_MODEL if model is None else Path(model).expanduser()
    words = [_argument(name, value) for name, value in {**_FIXED, **given}.items()]
    return [str(folder), *words]


def _plain(name: str, value: Any) -> Any:
    """Mappings, such as limit_mm_per_prompt={"image": 2}, as JSON; several values separated by commas."""
    if name in ServeSettings.SEVERAL and not isinstance(value, str):
        pairs = value.items() if isinstance(value, Mapping) else ()
        return ",".join([f"{key}={one}" for key, one in pairs] or map(str, value))
    return json.dumps(dict(value)) if isinstance(value, Mapping) else value


def _argument(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"
